#include "bench/bench_pipeline.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "tandem/error.h"

namespace tandem {
namespace {

using schedule::PipelineKind;

constexpr double kLayersPass = 4e-3;  ///< each pass of all layers of a rank

PipelineBench make_request(PipelineKind kind, int ranks, int microbatches) {
  const int chunks = schedule::min_chunks(kind);
  const double pass = kLayersPass / chunks;
  return {{kind, ranks, microbatches, chunks}, {pass, pass, pass, 0}, 2};
}

// A load on the machine only lengthens steps, so a second measurement may do.
TEST(BenchPipeline, BubbleIsTheSimulatedOne) {
  for (const PipelineKind kind : schedule::pipeline_kinds()) {
    for (const int ranks : {2, 4}) {
      for (const int microbatches : {8, 16}) {
        const PipelineBench request = make_request(kind, ranks, microbatches);
        PipelineBenchResult result = run_pipeline_bench(request);
        for (int retry = 0; retry < 2 && !result.ok(); ++retry) {
          result = run_pipeline_bench(request);
        }
        EXPECT_TRUE(result.ok()) << name_of(kind) << ", " << ranks << " ranks, " << microbatches
                                 << " microbatches: " << result.bubble() << ", simulated "
                                 << result.simulated_bubble();
        EXPECT_GE(result.unlinked.step.min_us, result.unlinked.simulated_us);
      }
    }
  }
}

}  // namespace
}  // namespace tandem
