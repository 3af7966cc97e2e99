// The backward pass of an MoE layer whose experts are spread over GPU ranks matches the slow
// reference (f64) over all ranks' rows for any routing, and has equal bits in every run.
#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "comm/device/signal_kernels.h"
#include "tandem/error.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/moe/cuda/gradient_problem.h"
#include "tests/overlap/moe/cuda/shapes.h"

namespace tandem::test {
namespace {

using namespace gpu;

class MoeRanksBackward : public OnGpus {};

TEST_P(MoeRanksBackward, MatchesReferenceForAnyShapeAndRouting) {
  run(
      [&](GpuCommunicator& comm) {
        uint64_t number = 0;
        const auto all_loads = loads(comm.size());
        for (const MoeShape& s : shapes(comm.size())) {
          MoeOnGpus layer(comm, s, {.backward = true}, Choosing::first, number % 2 == 0);
          const auto saved = layer.make_saved();
          MoeGradientCase problem(comm, s);
          for (int i = 0; i < 2; ++i) {
            const MoeRoutes& load = all_loads[number % all_loads.size()];
            problem.route(load, ++number);
            problem.poison();
            problem.reset();
            const auto pause = [&] {
              const uint32_t delay = philox(2, uint64_t(comm.rank()), ++number)[0] % 40000;
              if (delay < 20000) launch_pause(delay, comm.stream());
            };
            const size_t candidate = number / 2 % layer.candidates().size();
            pause();
            layer.run(candidate, problem.x(), problem.routing(), problem.w_in, problem.w_out,
                      problem.out(), saved.get());
            pause();
            const size_t backward = number % layer.backward_candidates().size();
            problem.run_backward(layer, *saved, backward);
            const std::string what = describe(s) + ", " + load.name + ", " +
                                     layer.candidates()[candidate].name + ", backward " +
                                     layer.backward_candidates()[backward].name;
            problem.expect_right(problem.result<uint16_t>(), what);
            const auto once = problem.found();
            problem.expect_right(once, what);
            problem.reset();
            pause();
            problem.run_backward(layer, *saved, backward == 0 ? 0 : number % 2 * backward);
            EXPECT_TRUE(problem.found() == once) << what << ": another run";
            if (testing::Test::HasFailure()) return comm.abort("a gradient is wrong");
          }
          EXPECT_EQ(layer.dropped_routings(), 0);
        }
      },
      60);
}

MoeShape small(int world) {
  return {.tokens = 50,
          .hidden = 264,
          .ffn = 64,
          .experts = 2 * world,
          .top_k = 2,
          .dtype = DType::bf16};
}

// Stored over NaNs in either dtype, they are the sums that are added to zeros.
TEST_P(MoeRanksBackward, StoresTheGradientsThatItAdds) {
  run([](GpuCommunicator& comm) {
    const MoeShape s = small(comm.size());
    MoeOnGpus layer(comm, s, {.backward = true}, Choosing::first);
    const auto saved = layer.make_saved();
    MoeGradientCase problem(comm, s);
    for (const MoeRoutes& load : loads(comm.size())) {
      problem.route(load, 7);
      problem.reset();
      layer.run(0, problem.x(), problem.routing(), problem.w_in, problem.w_out, problem.out(),
                saved.get());
      problem.run_backward(layer, *saved);
      const auto added = problem.found();
      for (size_t i = 0; i < layer.backward_candidates().size(); ++i) {
        for (const DType dtype : {DType::f32, s.dtype}) {
          EXPECT_TRUE(problem.stored_gradients(layer, i, *saved, dtype) ==
                      problem.rounded(added, dtype))
              << load.name << ", " << name_of(dtype) << ", " << layer.backward_candidates()[i].name;
        }
      }
    }
  });
}

TEST_P(MoeRanksBackward, StoresZerosIfNoRankBringsRows) {
  run([](GpuCommunicator& comm) {
    MoeShape s = small(comm.size());
    const MoeGradientCase problem(comm, s);
    s.tokens = 0;
    MoeLayer layer(comm, s, {.strategy = Strategy::serial, .backward = true});
    MoeBatch batch;
    const Tensor none(problem.dout().data(), s.dtype, {0, s.hidden}, problem.dout().device());
    const Tensor weights(problem.dweights().data(), DType::f32, {0, s.top_k},
                         problem.dweights().device());
    problem.reset(0xff);
    layer.backward(none, problem.w_in, problem.w_out, batch, none, weights, problem.dw_in(),
                   problem.dw_out(), WeightGradients::store);
    const auto found = problem.found();
    for (const auto* gradient : {&found.dw_in, &found.dw_out}) {
      EXPECT_EQ(std::ranges::count(*gradient, 0.0f), std::ptrdiff_t(gradient->size()));
    }
  });
}

TEST_P(MoeRanksBackward, BatchesInFlightKeepTheirOwnActivations) {
  run([](GpuCommunicator& comm) {
    const MoeShape s = small(comm.size());
    MoeLayer layer(comm, s, {.strategy = Strategy::serial, .backward = true});
    std::array<MoeBatch, 3> batches;
    std::vector<std::unique_ptr<MoeGradientCase>> problems;
    for (size_t i = 0; i < batches.size(); ++i) {
      problems.push_back(std::make_unique<MoeGradientCase>(comm, s));
      problems[i]->route({.imbalance = double(i)}, 5 + i);
    }
    for (size_t i = 0; i < batches.size(); ++i) {
      const MoeGradientCase& p = *problems[i];
      layer.forward(p.x(), p.routing(), p.w_in, p.w_out, p.out(), batches[i]);
    }
    for (size_t i = batches.size(); i-- > 0;) {
      const MoeGradientCase& p = *problems[i];
      p.reset();
      layer.backward(p.dout(), p.w_in, p.w_out, batches[i], p.dx(), p.dweights(), p.dw_in(),
                     p.dw_out());
    }
    for (size_t i = 0; i < batches.size(); ++i) {
      problems[i]->expect_right(problems[i]->found(), "batch " + std::to_string(i));
    }
    MoeBatch none;
    const MoeGradientCase& p = *problems[0];
    EXPECT_THROW(layer.backward(p.dout(), p.w_in, p.w_out, none, p.dx(), p.dweights(), p.dw_in(),
                                p.dw_out()),
                 InvalidArgument);
    EXPECT_THROW(layer.backward(p.dout(), p.w_in, p.w_out, batches[0], p.dx(), p.dweights(),
                                p.dw_out(), p.dw_in()),
                 InvalidArgument);
  });
}

TEST_P(MoeRanksBackward, OneGraphServesManyRoutings) {
  run(
      [](GpuCommunicator& comm) {
        const MoeShape s = small(comm.size());
        MoeOnGpus layer(comm, s, {.backward = true}, Choosing::first);
        const auto saved = layer.make_saved();
        MoeGradientCase problem(comm, s);
        problem.route({}, 1);  // all rows, the same number in every call
        const CapturedCalls graph(comm, [&] {
          layer.run(layer.candidates().size() - 1, problem.x(), problem.routing(), problem.w_in,
                    problem.w_out, problem.out(), saved.get());
          problem.run_backward(layer, *saved, layer.backward_candidates().size() - 1);
        });
        for (uint64_t routing = 0; routing < 20; ++routing) {
          problem.route({.imbalance = routing % 3 == 0 ? 0.0 : double(routing % 3)}, routing + 2);
          problem.reset();
          const uint32_t delay = philox(3, uint64_t(comm.rank()), routing)[0] % 40000;
          if (delay < 20000) launch_pause(delay, comm.stream());
          graph.launch();
          problem.expect_right(problem.found(), "routing " + std::to_string(routing));
        }
      },
      60);
}

// As padding has none.
TEST_P(MoeRanksBackward, RowsWithoutExpertsGiveZeros) {
  run([](GpuCommunicator& comm) {
    const MoeShape s = small(comm.size());
    for (const bool sorts : {false, true}) {
      MoeOnGpus layer(comm, s, {.backward = true}, Choosing::first, sorts);
      const auto saved = layer.make_saved();
      MoeGradientCase problem(comm, s);
      problem.MoeCase::route(
          std::vector<int32_t>{0, 1, -1, -1, 2 * comm.size() - 1, 0, -1, -1, 1, -1});
      problem.weigh(2, std::numeric_limits<float>::quiet_NaN());
      for (size_t candidate = 0; candidate < layer.candidates().size(); ++candidate) {
        problem.poison();
        problem.reset();
        layer.run(candidate, problem.x(), problem.routing(), problem.w_in, problem.w_out,
                  problem.out(), saved.get());
        problem.run_backward(layer, *saved, candidate % layer.backward_candidates().size());
        problem.expect_right(problem.result<uint16_t>(), layer.candidates()[candidate].name);
        const auto found = problem.found();
        for (int64_t row = 0; row < 5; ++row) {
          const auto dx = found.dx.begin() + row * s.hidden;
          const bool is_zero = std::all_of(dx, dx + s.hidden, [](uint16_t x) { return x == 0; });
          EXPECT_EQ(is_zero, row == 1 || row == 3) << row;
        }
        for (const size_t i : {2, 3, 6, 7, 9}) EXPECT_EQ(found.dweights[i], 0) << i;
      }
      EXPECT_EQ(layer.dropped_routings(), 0);
    }
  });
}

TEST_P(MoeRanksBackward, DroppedRoutingsHaveNoGradient) {
  run([](GpuCommunicator& comm) {
    const MoeShape s = small(comm.size());
    MoeOnGpus layer(comm, s, {.backward = true}, Choosing::first);
    const auto saved = layer.make_saved();
    MoeGradientCase problem(comm, s);
    problem.MoeCase::route(std::vector<int32_t>{0, s.experts, -2, 1, 1, 0});
    problem.reset();
    layer.run(0, problem.x(), problem.routing(), problem.w_in, problem.w_out, problem.out(),
              saved.get());
    problem.run_backward(layer, *saved);
    const auto found = problem.found();
    EXPECT_EQ(found.dweights[1], 0);
    EXPECT_EQ(found.dweights[2], 0);
    for (const size_t i : {0, 3, 4, 5}) {
      EXPECT_TRUE(std::isfinite(found.dweights[i]) && found.dweights[i] != 0) << i;
    }
    EXPECT_EQ(layer.dropped_routings(), 2);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, MoeRanksBackward, testing::Values(1, 2, 3, 4, 8), gpus_name);

}  // namespace
}  // namespace tandem::test
