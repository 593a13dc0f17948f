// Trees that grow from the likeliest node on where children depend on the path: a step for each opened node.
#pragma once
#include "growth/best_first.h"
#include "growth/confident_score.h"

namespace specengine {

// The tree of one request between two steps, and where its columns and the row of the node that is opened next go.
struct PathGrowth {
  BestFirst tree;            // its lists are those of the opened nodes
  int* opened;               // the node that is opened, -1: none
  int* count;                // nodes between two steps
  int* steps;                // of each opened node: the step that did it
  const float* confidences;  // of each opened node, as logits; nullptr: there are none
  int* tokens;               // of the columns
  float* scores;             // of the columns
  int *row_column, *row_token, *row_depth;
  unsigned* row_bits;  // [words] of opened nodes by their steps, the row's own included
  int64_t* row_above;  // the row of the parent in a memory of [steps, batch] rows
  int words, request, batch;

  // Takes note of the children of the opened node, of which the step's list is written; chooses the node to open next
  // and writes its row. exists: whether there are children.
  template <typename Threads>
  SPECENGINE_HOST_DEVICE void advance(int step, int node, bool exists, const Threads& threads) {
    const int before = step == 0 ? 1 : tree.count;
    if (exists) threads.once(tree, [&] { return tree.open(node); });
    const int next = next_opened(tree, threads);
    threads.once(tree, [&] {
      steps[node] = step;
      for (int column = before; column < tree.count; ++column) write_column(column);
      opened[0] = next, count[0] = tree.count;
      write_row(next, step + 1);
      return 0;
    });
  }

  // Writes the row of a node; of -1 padding.
  SPECENGINE_HOST_DEVICE void write_row(int node, int step) const {
    row_column[0] = node, row_token[0] = node < 0 ? -1 : tokens[node];
    row_depth[0] = node < 0 ? -1 : tree.nodes.depths[node];
    row_above[0] = request;
    for (int word = 0; word < words; ++word) row_bits[word] = 0;
    if (node < 0) return;
    row_above[0] += static_cast<int64_t>(steps[tree.nodes.parents[node]]) * batch;
    row_bits[step / 32] |= 1u << step % 32;
    for (int above = tree.nodes.parents[node]; above >= 0; above = tree.nodes.parents[above]) {
      row_bits[steps[above] / 32] |= 1u << steps[above] % 32;
    }
  }

 private:
  SPECENGINE_HOST_DEVICE void write_column(int node) const {
    const int parent = tree.nodes.parents[node], rank = tree.nodes.ranks[node];
    tokens[node] = tree.children.token(parent, rank);
    scores[node] = static_cast<float>(tree.nodes.scores[node]);
    if (confidences == nullptr) return;
    scores[node] = scores[parent] + confident_score(confidences[parent], rank, tree.children.log_prob(parent, 0),
                                                    tree.children.log_prob(parent, rank));
  }
};

}  // namespace specengine
