#include "bench/engine/bench_pipeline.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "tandem/error.h"

namespace tandem {
namespace {

using schedule::PipelineKind;

constexpr double kLayersPass = 8e-3;  ///< each pass of all layers of a rank

PipelineBench make_request(PipelineKind kind, int ranks, int microbatches) {
  const int chunks = schedule::min_chunks(kind);
  const double pass = kLayersPass / chunks;
  return {{kind, ranks, microbatches, chunks}, {pass, pass, pass, 0}, 2};
}

bool hides_transfers(const PipelineBench& request) {
  const auto makespan = [&](int microbatches, double transfer) {
    schedule::PipelineShape shape = request.shape;
    schedule::PassCosts costs = request.costs;
    shape.microbatches = microbatches;
    costs.transfer = transfer;
    return simulate(shape, pipeline_actions(shape), costs).makespan;
  };
  const auto further = [&](double transfer) {
    return makespan(32, transfer) - makespan(16, transfer);
  };
  return further(request.costs.transfer) < 1.01 * further(0);
}

// A load on the machine only lengthens steps, so another measurement may do.
TEST(BenchPipelineLong, BubbleIsTheSimulatedOne) {
  for (const PipelineKind kind : schedule::pipeline_kinds()) {
    for (const int ranks : {2, 4}) {
      for (const int microbatches : {8, 16}) {
        PipelineBench request = make_request(kind, ranks, microbatches);
        request.repeats = 1;
        PipelineBenchResult result = run_pipeline_bench(request);
        for (int retry = 0; retry < 4 && !result.ok(); ++retry) {
          result = run_pipeline_bench(request);
        }
        EXPECT_TRUE(result.ok()) << name_of(kind) << ", " << ranks << " ranks, " << microbatches
                                 << " microbatches: " << result.bubble() << ", simulated "
                                 << result.simulated_bubble();
        EXPECT_GE(result.unlinked.step.min_us, result.unlinked.simulated_us);
        EXPECT_TRUE(result.receipts.empty());  // passes that sleep run no operator
      }
    }
  }
}

/// Schedules whose transfers are hidden in steady state, by the simulator.
TEST(BenchPipelineLong, TransfersAreHiddenInSteadyState) {
  std::string hidden;
  for (const PipelineKind kind : schedule::pipeline_kinds()) {
    PipelineBench request = make_request(kind, 4, 16);
    request.costs.transfer = request.costs.forward;
    if (!hides_transfers(request)) continue;
    hidden += fmt::format("{} ", name_of(kind));
    double exposed = 1;
    for (int attempt = 0; attempt < 4 && exposed > 0.03; ++attempt) {
      exposed = run_pipeline_bench(request).steady_exposed();
    }
    EXPECT_LE(exposed, 0.03) << name_of(kind);
  }
  EXPECT_EQ(hidden, "gpipe interleaved zb-v dualpipe-v ");
}

TEST(BenchPipeline, WrongRequestsAreErrors) {
  EXPECT_THROW(run_pipeline_bench(make_request(PipelineKind::dualpipe_v, 4, 4)), ConfigError);
  PipelineBench request = make_request(PipelineKind::gpipe, 2, 2);
  request.costs.forward = 0;
  EXPECT_THROW(run_pipeline_bench(request), InvalidArgument);
}

}  // namespace
}  // namespace tandem
