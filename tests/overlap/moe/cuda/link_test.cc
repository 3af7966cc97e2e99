// An MoE layer of GPU ranks on an emulated link gives the same bits as without one, and no
// candidate is faster than the bytes a rank sends at the link's rate plus the latency of the
// arrivals before it.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "overlap/moe/cuda/layer.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/moe/cuda/gradient_problem.h"
#include "tests/overlap/moe/cuda/shapes.h"
#include "tune/cuda/measure.h"

namespace tandem::test {
namespace {

using namespace gpu;

using Bits = std::vector<uint16_t>;

class MoeLinkPacing : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!has_gpus_for(1)) GTEST_SKIP() << "needs a GPU";
  }
  /// A single rank gets half of its GPU: a link needs ranks that share one.
  void run(const std::optional<EmulatedLink>& link,
           const std::function<void(GpuCommunicator&)>& body) {
    run_gpus({GetParam(), link, 30, std::max(2, GetParam())},
             [&](Communicator& comm) { body(as_gpu(comm)); });
  }
};

struct Wires {
  Wire dispatch, combine;
};

std::vector<Wires> wires() {
  const Wire int8 = Wire::parse("int8"), int4 = Wire::parse("int4:g32");
  return {{}, {int8, int4}, {int4, {}}, {{}, Wire::parse("mxfp8")}};
}

void forward(MoeOnGpus& layer, size_t candidate, const MoeCase& p,
             MoeSavedActivations* saved = nullptr) {
  layer.run(candidate, p.x(), p.routing(), p.w_in, p.w_out, p.out(), saved);
}

/// Results of a rank: some candidates of layers of every shape, alternating on every routing.
struct Results {
  std::vector<Bits> forward;
  std::vector<MoeGradientCase::Found> backward;
  bool operator==(const Results&) const = default;
};

Results results_on(GpuCommunicator& comm) {
  Results results;
  const auto all_loads = loads(comm.size());
  const auto all_wires = wires();
  uint64_t number = 0;
  for (const MoeShape& s : shapes(comm.size())) {
    const MoeRoutes& load = all_loads[number % all_loads.size()];
    const Wires& as = all_wires[number % all_wires.size()];
    const MoeOptions options{
        .dispatch = as.dispatch, .combine = as.combine, .allow_uncompressed = true};
    MoeOnGpus layer(comm, s, options, Choosing::first, number / all_wires.size() % 2 == 0);
    MoeOnGpus training(comm, s, {.backward = true}, Choosing::first);
    MoeGradientCase problem(comm, s);
    problem.route(load, ++number);
    const size_t last = layer.candidates().size() - 1;
    for (const size_t candidate : {size_t(0), number % (last + 1), last}) {
      problem.poison();
      forward(layer, candidate, problem);
      results.forward.push_back(problem.result<uint16_t>());
      if (candidate > 0) continue;
      problem.MoeCase::expect_right(results.forward.back(), describe(s) + ", " + load.name);
    }
    const auto saved = training.make_saved();
    problem.reset();
    forward(training, number % training.candidates().size(), problem, saved.get());
    problem.run_backward(training, *saved, number % training.backward_candidates().size());
    results.backward.push_back(problem.found());
  }
  return results;
}

TEST_P(MoeLinkPacing, BitsMatchThoseWithoutALink) {
  std::vector<Results> with(static_cast<size_t>(GetParam())), without = with;
  run(EmulatedLink{5e9, 5e-6},
      [&](GpuCommunicator& comm) { with[size_t(comm.rank())] = results_on(comm); });
  run({}, [&](GpuCommunicator& comm) { without[size_t(comm.rank())] = results_on(comm); });
  for (size_t rank = 0; rank < with.size(); ++rank) {
    EXPECT_FALSE(with[rank].forward.empty());
    EXPECT_TRUE(with[rank] == without[rank]) << rank;
  }
}

TEST_P(MoeLinkPacing, PublicLayerRunsOnALink) {
  run(EmulatedLink{5e9, 5e-6}, [](GpuCommunicator& comm) {
    const MoeShape s = two_experts_each(comm, 50, 520);
    MoeCase problem(comm, s);
    problem.route({.imbalance = 0}, 3);
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped, Strategy::automatic}) {
      MoeLayer layer(comm, s, {.strategy = strategy});
      MoeBatch batch;
      problem.poison();
      layer.forward(problem.x(), problem.routing(), problem.w_in, problem.w_out, problem.out(),
                    batch);
      problem.expect_right(problem.result<uint16_t>(), std::string(name_of(strategy)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, MoeLinkPacing, testing::Values(1, 2, 3, 4), gpus_name);

/// Data that one rank sends in a call.
struct Sent {
  int64_t announced = 0;       ///< bytes
  int64_t rows = 0, sums = 0;  ///< to other ranks; of rows of other ranks
  int64_t d_gate_weight = 0;   ///< gradients of the routing weights of other ranks' rows
  double forward(const MoeShape& s, const Wires& as) const {
    const auto each = [&](const Wire& wire) {
      return wire.is_none() ? s.hidden * 2 : int64_t(wire.bytes(s.hidden, s.dtype));
    };
    return double(announced + rows * each(as.dispatch) + sums * each(as.combine));
  }
  double backward(const MoeShape& s) const { return forward(s, {}) + double(d_gate_weight * 4); }
};

Sent sent_by(const GpuCommunicator& comm, const MoeCase& p, const MoeShape& s,
             const MoeRoutes& load, uint64_t seed) {
  const schedule::MoeGrid grid{s.experts, comm.size() / s.tp, s.tp};
  Sent sent{.announced = (comm.size() - 1) * s.tokens * s.top_k * 8};
  for (int rank = 0; rank < comm.size(); ++rank) {
    const std::vector<int32_t> chosen = p.chosen_of(load, seed, rank);
    for (size_t first = 0; first < chosen.size(); first += size_t(s.top_k)) {
      unsigned token_in_rank = 0;
      for (size_t i = first; i < first + size_t(s.top_k); ++i) {
        const unsigned of_one = ((1u << s.tp) - 1) << grid.holder(chosen[i]);
        token_in_rank |= of_one;
        sent.d_gate_weight += rank != comm.rank() && (of_one >> comm.rank() & 1);
      }
      if (rank == comm.rank()) {
        sent.rows += std::popcount(token_in_rank & ~(1u << rank));
      } else {
        sent.sums += token_in_rank >> comm.rank() & 1;
      }
    }
  }
  return sent;
}

class MoeLinkTimes : public MoeLinkPacing {
 protected:
  /// `call` has run before. Expert ids arrive before rows are sent, and a last message follows.
  static void expect_no_faster(Stopwatch& stopwatch, const EmulatedLink& link, double bytes,
                               const std::string& what, const std::function<void()>& call) {
    const double minimum = (bytes / link.bytes_per_s + 2 * link.latency_s) * 1e6;
    const double us = stopwatch.time_once(call, 1000);
    EXPECT_GE(us, minimum) << what << ", " << link.describe();
    EXPECT_LE(us, 5 * minimum + 20000) << what << ", " << link.describe();
  }
};

// One link has low bandwidth, the other high latency.
constexpr EmulatedLink kLinks[] = {{2e9, 20e-6}, {1e12, 1e-3}};

MoeShape wide(int world, int tp) {
  return {.tokens = 300,
          .hidden = 1032,
          .ffn = 96,  // 8 for each of up to 4 ranks
          .experts = 2 * world / tp,
          .top_k = 2,
          .tp = tp,
          .dtype = DType::bf16};
}

TEST_P(MoeLinkTimes, NoCandidateIsFasterThanTheLink) {
  for (const EmulatedLink& link : kLinks) {
    run(link, [&](GpuCommunicator& comm) {
      Stopwatch stopwatch(comm);
      const auto all_loads = loads(comm.size());
      uint64_t number = 0;
      for (const int tp : std::set<int>{1, comm.size()}) {
        const MoeShape s = wide(comm.size(), tp);
        MoeCase problem(comm, s);
        for (const Wires& as : wires()) {
          for (const bool sorts : {false, true}) {
            const MoeOptions options{.dispatch = as.dispatch, .combine = as.combine};
            MoeOnGpus layer(comm, s, options, Choosing::first, sorts);
            for (size_t candidate = 0; candidate < layer.candidates().size(); ++candidate) {
              const MoeRoutes& load = all_loads[number % all_loads.size()];
              problem.route(load, ++number);
              forward(layer, 0, problem);
              const Bits bits = problem.result<uint16_t>();
              problem.poison();
              forward(layer, candidate, problem);
              EXPECT_EQ(problem.result<uint16_t>(), bits) << layer.candidates()[candidate].name;
              problem.poison();
              const Sent sent = sent_by(comm, problem, s, load, number);
              expect_no_faster(stopwatch, link, sent.forward(s, as),
                               fmt::format("{}, {}, {}", layer.candidates()[candidate].name,
                                           load.name, describe(s)),
                               [&] { forward(layer, candidate, problem); });
              EXPECT_EQ(problem.result<uint16_t>(), bits) << layer.candidates()[candidate].name;
              if (HasFailure()) return comm.abort("a way is wrong");
            }
          }
        }
      }
    });
  }
}

TEST_P(MoeLinkTimes, NoBackwardIsFasterThanTheLink) {
  for (const EmulatedLink& link : kLinks) {
    run(link, [&](GpuCommunicator& comm) {
      Stopwatch stopwatch(comm);
      uint64_t number = 0;
      for (const int tp : std::set<int>{1, comm.size()}) {
        const MoeShape s = wide(comm.size(), tp);
        MoeGradientCase problem(comm, s);
        MoeOnGpus layer(comm, s, {.backward = true}, Choosing::first);
        const auto saved = layer.make_saved();
        for (const MoeRoutes& load : loads(comm.size())) {
          problem.route(load, ++number);
          forward(layer, number % layer.candidates().size(), problem, saved.get());
          const size_t candidate = number % layer.backward_candidates().size();
          problem.run_backward(layer, *saved, candidate);
          const Sent sent = sent_by(comm, problem, s, load, number);
          expect_no_faster(stopwatch, link, sent.backward(s), load.name + ", " + describe(s),
                           [&] { problem.run_backward(layer, *saved, candidate); });
          if (HasFailure()) return comm.abort("a backward pass is too fast");
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, MoeLinkTimes, testing::Values(2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
