#include "schedule/pipeline.h"

#include <gtest/gtest.h>

#include <vector>

#include "tandem/error.h"

namespace tandem::schedule {
namespace {

constexpr PassKind kF = PassKind::forward, kB = PassKind::backward;

TEST(Pipeline, OneForwardOneBackward) {
  const PipelineShape shape{.kind = PipelineKind::one_f_one_b, .ranks = 2, .microbatches = 3};
  EXPECT_EQ(pipeline_actions(shape, 0),
            (std::vector<PipelineAction>{
                {kF, 0, 0}, {kF, 0, 1}, {kB, 0, 0}, {kF, 0, 2}, {kB, 0, 1}, {kB, 0, 2}}));
  EXPECT_EQ(pipeline_actions(shape, 1),
            (std::vector<PipelineAction>{
                {kF, 0, 0}, {kB, 0, 0}, {kF, 0, 1}, {kB, 0, 1}, {kF, 0, 2}, {kB, 0, 2}}));
}

TEST(Pipeline, UnknownNamesAndChunksAreRefused) {
  EXPECT_EQ(parse_pipeline_kind("gpipe"), PipelineKind::gpipe);
  EXPECT_THROW(parse_pipeline_kind("2f2b"), ConfigError);
  EXPECT_THROW(check_pipeline({.kind = PipelineKind::gpipe, .ranks = 2, .chunks = 2}), ConfigError);
}

}  // namespace
}  // namespace tandem::schedule
