// Help and docs/guide/training.md describe every key and metric.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/files.h"
#include "engine/config/config.h"
#include "engine/train/metrics_log.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

TEST(Config, DescriptionListsEveryKey) {
  const std::string text = describe_config_keys();
  for (const ConfigKey& key : config_keys()) EXPECT_THAT(text, HasSubstr(key.name));
}

/// Rows of docs/guide/training.md, formatted as in its tables.
std::vector<std::string> rows_of_keys() {
  std::istringstream lines(describe_config_keys());
  std::vector<std::string> rows;
  for (std::string line; std::getline(lines, line);) {
    const size_t name = line.find(' '), help = line.find_first_not_of(' ', name);
    const size_t spec = line.rfind(" (");
    rows.push_back(fmt::format("| `{}` | {} | {} |", line.substr(0, name),
                               line.substr(help, spec - help),
                               line.substr(spec + 2, line.size() - spec - 3)));
  }
  return rows;
}

TEST(Config, TrainingPageHasEveryKeyAsDescribed) {
  std::istringstream page(read_file(TANDEM_SOURCE_DIR "/docs/guide/training.md"));
  std::vector<std::string> rows;
  std::string section;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("## ")) section = line;
    if (section == "## Keys of the job file" && line.starts_with("| `")) rows.push_back(line);
  }
  EXPECT_EQ(rows, rows_of_keys());
}

TEST(Config, TrainingPageNamesEveryMetric) {
  const std::string page = read_file(TANDEM_SOURCE_DIR "/docs/guide/training.md");
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
