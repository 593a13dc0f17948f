"""The paths of a drafted tree."""


def paths(tree):
    """Root-to-leaf token paths, root left out."""
    leaves = set(range(len(tree.tokens))) - set(tree.parents)
    result = []
    for node in sorted(leaves):
        path = []
        while node:
            path.append(tree.tokens[node])
            node = tree.parents[node]
        result.append(path[::-1])
    return result
