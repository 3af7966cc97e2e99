// Help describes every key, and docs/reference/files.md every metric.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "core/system/files.h"
#include "engine/config/config.h"
#include "engine/train/records/metrics_log.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

TEST(Config, DescriptionListsEveryKey) {
  const std::string text = describe_config_keys();
  for (const ConfigKey& key : config_keys()) EXPECT_THAT(text, HasSubstr(key.name));
}

TEST(Config, PageOfFilesNamesEveryMetric) {
  const std::string page = read_file(TANDEM_SOURCE_DIR "/docs/reference/files.md");
  StepRecord all;
  all.uncompressed_gradient_bytes = 1;
  all.validation_loss = all.aux_loss = all.bubble = 1;
  all.stage_bytes = all.tp_bytes = all.expert_bytes = 1;
  all.checkpoint_ms = 1;
  all.saved_step = 1;
  all.imbalance = {1};
  const auto line = nlohmann::json::parse(to_json_line(all));
  for (const auto& [key, value] : line.items())
    EXPECT_THAT(page, HasSubstr(fmt::format("`{}`", key)));
}

}  // namespace
}  // namespace tandem
