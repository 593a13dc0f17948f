"""Random trees, and single paths through them as passes of their own."""

from specengine.draft_trees.tree import DraftTree, TreeLayout


def random_tree(nodes, vocab, random):
    parents = [-1, *(random.randrange(max(0, node - 5), node) for node in range(1, nodes))]
    return DraftTree([random.randrange(vocab) for _ in range(nodes)], parents)


def path_to(tree, node):
    path = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


def chain(model, tokens):
    return TreeLayout(model.device).of([DraftTree(tokens, [*range(-1, len(tokens) - 1)])])
