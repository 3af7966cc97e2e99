// An MoE layer whose experts are spread over GPU ranks matches the slow reference (f64) by every
// candidate and for any routing, and all candidates give equal bits.
#include <fmt/format.h>

#include <limits>
#include <string>

#include "comm/device/signal_kernels.h"
#include "overlap/moe/cuda/layer.h"
#include "tandem/error.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/moe/cuda/problem.h"
#include "tests/overlap/moe/cuda/shapes.h"

namespace tandem::test {
namespace {

using namespace gpu;

class MoeRanks : public OnGpus {};

TEST_P(MoeRanks, MatchesReferenceForAnyShapeAndRouting) {
  run(
      [&](GpuCommunicator& comm) {
        uint64_t number = 0;
        for (const MoeShape& s : shapes(comm.size())) {
          MoeOnGpus layer(comm, s, {}, Choosing::first, false);
          MoeOnGpus sorting(comm, s, {}, Choosing::first, true);
          MoeCase problem(comm, s);
          for (const MoeRoutes& load : loads(comm.size())) {
            problem.route(load, ++number);
            const auto run = [&](size_t candidate, DType dtype, MoeOnGpus& of) {
              problem.poison();
              const uint32_t delay = philox(2, uint64_t(comm.rank()), ++number)[0] % 40000;
              if (delay < 20000) launch_pause(delay, comm.stream());
              of.run(candidate, problem.x(), problem.routing(), problem.w_in, problem.w_out,
                     problem.out(dtype));
            };
            const std::string what = describe(s) + ", " + load.name;
            run(0, s.dtype, layer);
            const auto bits = problem.result<uint16_t>();
            problem.expect_right(bits, what);
            const size_t other = number / 2 % layer.candidates().size();
            run(other, s.dtype, layer);
            EXPECT_EQ(problem.result<uint16_t>(), bits)
                << what << ", " << layer.candidates()[other].name << " against serial";
            const size_t sorted = number / 2 % sorting.candidates().size();
            run(sorted, s.dtype, sorting);
            EXPECT_EQ(problem.result<uint16_t>(), bits)
                << what << ", " << sorting.candidates()[sorted].name << " of a layer that sorts";
            run(layer.candidates().size() - 1, DType::f32, layer);
            std::vector<uint16_t> rounded;
            for (const float value : problem.result<float>()) {
              rounded.push_back(stored(s.dtype, value));
            }
            EXPECT_EQ(rounded, bits) << what << ", f32 out";
            if (testing::Test::HasFailure()) return comm.abort("a result is wrong");
          }
          EXPECT_EQ(layer.dropped_routings(), 0);
        }
      },
      30);
}

TEST_P(MoeRanks, OneGraphServesManyRoutings) {
  run([](GpuCommunicator& comm) {
    const MoeShape s = two_experts_each(comm, 50, 520);
    MoeOnGpus layer(comm, s, {}, Choosing::first, true);
    MoeCase problem(comm, s);
    problem.route({}, 1);  // all rows, the same number in every call
    std::vector<CapturedCalls> graphs;
    for (const size_t candidate :
         {size_t(0), size_t(1), layer.candidates().size() / 2, layer.candidates().size() - 1}) {
      graphs.emplace_back(comm, [&, candidate] {
        layer.run(candidate, problem.x(), problem.routing(), problem.w_in, problem.w_out,
                  problem.out());
      });
    }
    for (uint64_t routing = 0; routing < 120; ++routing) {
      problem.route({.imbalance = routing % 3 == 0 ? 0.0 : double(routing % 3)}, routing + 2);
      std::vector<uint16_t> bits;
      for (const CapturedCalls& graph : graphs) {
        problem.poison();
        const uint32_t delay = philox(3, uint64_t(comm.rank()), routing)[0] % 40000;
        if (delay < 20000) launch_pause(delay, comm.stream());
        graph.launch();
        const auto found = problem.result<uint16_t>();
        if (bits.empty()) {
          problem.expect_right(found, fmt::format("routing {}", routing));
        } else {
          ASSERT_EQ(found, bits) << "routing " << routing;
        }
        bits = found;
      }
    }
  });
}

TEST_P(MoeRanks, CallsMayBeBackToBackUnderDelays) {
  run([](GpuCommunicator& comm) {
    const MoeShape s = two_experts_each(comm, 40, 776);
    MoeOnGpus layer(comm, s, {}, Choosing::first, true);
    MoeCase problem(comm, s), other(comm, s);
    problem.route({.imbalance = 0}, 1);
    other.route({.one_holder = true}, 2);
    std::vector<uint16_t> bits[2];
    const auto call = [&](MoeCase& p, size_t candidate) {
      layer.run(candidate, p.x(), p.routing(), p.w_in, p.w_out, p.out());
    };
    call(problem, 0);
    call(other, 0);
    bits[0] = problem.result<uint16_t>();
    bits[1] = other.result<uint16_t>();
    for (uint64_t i = 0; i < 25; ++i) {
      for (uint64_t j = 0; j < 6; ++j) {
        const auto draw = philox(7, 0, 6 * i + j);
        const uint32_t delay = philox(8, uint64_t(comm.rank()), 6 * i + j)[0] % 100000;
        if (delay < 30000) launch_pause(delay, comm.stream());
        MoeCase& p = draw[0] % 2 ? other : problem;
        p.poison();
        call(p, draw[1] % layer.candidates().size());
      }
      call(problem, i % layer.candidates().size());
      call(other, i % layer.candidates().size());
      ASSERT_EQ(problem.result<uint16_t>(), bits[0]) << i;
      ASSERT_EQ(other.result<uint16_t>(), bits[1]) << i;
    }
  });
}

TEST_P(MoeRanks, InvalidExpertIdsAreCounted) {
  run([](GpuCommunicator& comm) {
    const MoeShape s = two_experts_each(comm, 6, 64);
    MoeOnGpus layer(comm, s, {}, Choosing::first, true);
    MoeCase problem(comm, s);
    problem.route({0, s.experts, -2, 1, 1, 1, s.experts - 1, 0, std::numeric_limits<int32_t>::max(),
                   std::numeric_limits<int32_t>::min(), 1, 0});
    problem.weigh(6, std::numeric_limits<float>::quiet_NaN());
    problem.weigh(11, std::numeric_limits<float>::infinity());
    int64_t dropped = 0;
    for (size_t candidate = 0; candidate < layer.candidates().size(); ++candidate) {
      layer.run(candidate, problem.x(), problem.routing(), problem.w_in, problem.w_out,
                problem.out());
      problem.expect_right(problem.result<uint16_t>(), layer.candidates()[candidate].name);
      EXPECT_EQ(layer.dropped_routings(), dropped += 7);
    }
  });
}

TEST_P(MoeRanks, PublicLayerSelectsACandidate) {
  run([](GpuCommunicator& comm) {
    const MoeShape s = two_experts_each(comm, 64, 64);
    MoeLayer layer(comm, s);
    MoeCase problem(comm, s);
    problem.route({.imbalance = 0}, 3);
    MoeBatch batch;
    layer.forward(problem.x(), problem.routing(), problem.w_in, problem.w_out, problem.out(),
                  batch);
    problem.expect_right(problem.result<uint16_t>(),
                         std::string(name_of(layer.dispatch_strategy())));
    EXPECT_EQ(layer.dispatch_strategy(), layer.combine_strategy());
    EXPECT_THROW(layer.forward(problem.x(), problem.routing(), problem.w_out, problem.w_out,
                               problem.out(), batch),
                 InvalidArgument);
    EXPECT_THROW(layer.backward(problem.x(), problem.w_in, problem.w_out, batch, problem.out(),
                                problem.out(), problem.out(), problem.out()),
                 InvalidArgument);
    for (const auto& [change, named] : std::vector<std::pair<void (*)(MoeShape&), const char*>>{
             {[](MoeShape& of) { of.hidden = 12; }, "hidden 12"},
             {[](MoeShape& of) { of.ffn = 20; }, "ffn 20"},
             {[](MoeShape& of) { of.top_k = 99; }, "top_k 99"},
             {[](MoeShape& of) { of.dtype = DType::f32; }, "dtype f32"}}) {
      MoeShape wrong = s;
      change(wrong);
      try {
        MoeLayer(comm, wrong);
        ADD_FAILURE() << named;
      } catch (const InvalidArgument& error) {
        EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, MoeRanks, testing::Values(1, 2, 3, 4, 8), gpus_name);

class MoeLostRank : public OnGpus {};

TEST_P(MoeLostRank, LostRankIsNamed) {
  struct Called {
    bool serial, sorts;
  };
  for (const Called& how : {Called{true, false}, {false, false}, {false, true}}) {
    const auto error = timeout_without_last([&](GpuCommunicator& comm) {
      const MoeShape s = two_experts_each(comm, 40, 264);
      return call_of_layer(comm, s, {}, how.serial, how.sorts);
    });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->op, "all_to_all");
    if (gpu_count() >= ranks()) continue;  // threads of other processes are not visible
    const std::string late = fmt::format("rank {} has made", ranks() - 1), said = error->what();
    EXPECT_NE(said.find(late), std::string::npos) << said;
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, MoeLostRank, testing::Values(2, 3, 4, 8), gpus_name);

}  // namespace
}  // namespace tandem::test
