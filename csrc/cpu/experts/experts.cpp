// Routing, grouping and adding up of a mixture of experts; ExpertLinear is in linear.cpp, with the kernels it shares.
#include "ops/experts/experts.h"

#include <numeric>

#include "cpu/parallel_for.h"
#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {
namespace {

// 32 chains, one lane each, added in the order of ops/experts/experts.h.
struct RouterSum {
  static constexpr int kVectors = kRouterLanes / kLanes;
  f32x8 lanes[kVectors] = {};

  float total() const {
    static_assert(kVectors == 4);
    return sum8((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]));
  }
};

template <typename Weight>
float router_product(const float* x, const Weight* weight, int64_t columns) {
  RouterSum sum;
  int64_t c = 0;
  for (; c + kRouterLanes <= columns; c += kRouterLanes) {
    for (int v = 0; v < RouterSum::kVectors; ++v) {
      sum.lanes[v] = fmadd(load8(x + c + v * kLanes), load8(weight + c + v * kLanes), sum.lanes[v]);
    }
  }
  for (int64_t i = 0; c + i < columns; ++i) {
    float& lane = reinterpret_cast<float*>(sum.lanes)[i];
    lane = fmadd(x[c + i], load1(weight + c + i), lane);
  }
  return sum.total();
}

// Experts of a task for all rows: rows of x that stay in the second-level cache pass by them.
template <typename Weight>
void route(const RouteRows& op) {
  constexpr int64_t kExperts = 8, kRows = 8;
  const int64_t M = op.x.shape[0], C = op.x.shape[1], E = op.router.shape[0];
  parallel_for((E + kExperts - 1) / kExperts, [&](int64_t task) {
    for (int64_t first = 0; first < M; first += kRows) {
      for (int64_t e = task * kExperts; e < std::min(E, (task + 1) * kExperts); ++e) {
        const float bias = op.bias.defined() ? op.bias.as<float>()[e] : 0.0f;
        for (int64_t m = first; m < std::min(M, first + kRows); ++m) {
          const float* x = op.x.as<float>() + m * C;
          op.logits.as<float>()[m * E + e] = router_product(x, op.router.as<Weight>() + e * C, C) + bias;
        }
      }
    }
  });
}

// The sum of exp(logit - largest) over all experts, in the order of a router's product.
float exp_sum(const float* logits, int64_t experts, float largest) {
  RouterSum sum;
  for (int64_t e = 0; e < experts; e += kLanes) {
    float eight[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) eight[i] = e + i < experts ? logits[e + i] : -INFINITY;
    sum.lanes[e / kLanes % RouterSum::kVectors] += exp8(load8(eight) - splat(largest));
  }
  return sum.total();
}

void choose(const RouteRows& op, int64_t m) {
  const int64_t E = op.router.shape[0], k = op.experts.shape[1];
  const float* logits = op.logits.as<float>() + m * E;
  int32_t* experts = op.experts.as<int32_t>() + m * k;
  float* weights = op.weights.as<float>() + m * k;
  bool taken[kMostExperts] = {};
  for (int64_t slot = 0; slot < k; ++slot) {
    int64_t best = -1;
    for (int64_t e = 0; e < E; ++e) {
      if (!taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
    }
    taken[best] = true;
    experts[slot] = static_cast<int32_t>(best);
    weights[slot] = exp1(logits[best] - logits[experts[0]]);
  }
  const float sum = op.renormalise ? std::accumulate(weights, weights + k, 0.0f) : exp_sum(logits, E, logits[*experts]);
  for (int64_t slot = 0; slot < k; ++slot) weights[slot] /= sum;
}

}  // namespace

void run(const RouteRows& op) {
  with_float_type(op.router.dtype, [&](auto zero) { route<decltype(zero)>(op); });
  parallel_for(op.x.shape[0], [&](int64_t m) {
    choose(op, m);
    if (!op.shared_gate.defined()) return;
    const int64_t C = op.x.shape[1];
    const float gate = router_product(op.x.as<float>() + m * C, op.shared_gate.as<float>(), C);
    op.shared_scale.as<float>()[m] = 1.0f / (1.0f + exp1(-gate));
  });
}

void run(const GroupPairs& op) {
  const int64_t pairs = op.experts.numel(), k = op.experts.shape[1], E = op.num_experts();
  const int32_t* experts = op.experts.as<int32_t>();
  int32_t* starts = op.starts.as<int32_t>();
  check_ids(op.experts, "experts", E);
  std::fill(starts, starts + E + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) ++starts[experts[i] + 1];
  std::partial_sum(starts, starts + E + 1, starts);
  // Each expert's start moves over its places; the last step moves them back.
  for (int64_t i = 0; i < pairs; ++i) {
    const int32_t place = starts[experts[i]]++;
    op.rows.as<int32_t>()[place] = static_cast<int32_t>(i / k);
    op.places.as<int32_t>()[i] = place;
  }
  std::copy_backward(starts, starts + E, starts + E + 1);
  starts[0] = 0;
}

void run(const CombineExperts& op) {
  const int64_t C = op.out.shape[1], k = op.places.shape[1], places = op.y.shape[0];
  check_ids(op.places, "places", places);
  parallel_for(op.out.shape[0], [&](int64_t m) {
    const int32_t* place = op.places.as<int32_t>() + m * k;
    const float* weight = op.weights.as<float>() + m * k;
    const float* shared = op.shared.defined() ? op.shared.as<float>() + m * C : nullptr;
    const float scale = op.shared_scale.defined() ? op.shared_scale.as<float>()[m] : 1.0f;
    float* out = op.out.as<float>() + m * C;
    const auto add_up = [&]<typename V>(int64_t c, V sum) {
      for (int64_t s = 0; s < k; ++s) {
        sum = fmadd(splat_of<V>(weight[s]), load<V>(op.y.as<float>() + place[s] * C + c), sum);
      }
      if (shared) sum = fmadd(splat_of<V>(scale), load<V>(shared + c), sum);
      store(out + c, sum);
    };
    int64_t c = 0;
    for (; c + kLanes <= C; c += kLanes) add_up(c, f32x8{});
    for (; c < C; ++c) add_up(c, 0.0f);
  });
}

}  // namespace specengine::SPECENGINE_ISA
