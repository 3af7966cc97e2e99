#include "engine/report/metrics_file.h"

#include <algorithm>
#include <cmath>

#include "core/system/files.h"
#include "core/system/json.h"

namespace tandem::report {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::optional<std::string> read_if_there(const fs::path& file) {
  if (!path_exists(file)) return std::nullopt;
  try {
    return read_file(file, Source::no_link);
  } catch (const IoError& error) {
    throw IoError(fmt::format("report: {}", error.what()));
  }
}

Json parse_named(std::string_view text, const std::string& location) {
  Json json = parse_json<Json>(text);
  if (!json.is_discarded()) return json;
  throw IoError(
      fmt::format("report: {}: not JSON, or nested more than {} deep", location, kMaxJsonDepth));
}

Metrics read_metrics(const fs::path& file) {
  const auto text = read_if_there(file);
  if (!text) {
    throw IoError(fmt::format("report: {}: not found, expected what `tandem train` writes there",
                              file.string()));
  }
  Metrics metrics;
  size_t line_number = 0;
  for (size_t begin = 0; begin < text->size();) {
    const size_t end = std::min(text->find('\n', begin), text->size());
    const std::string_view line(text->data() + begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.empty()) continue;
    const bool is_cut = end == text->size() && !metrics.step.empty();
    if (is_cut && parse_json(line).is_discarded()) break;  // it is being written
    const std::string location = fmt::format("{}:{}", file.string(), line_number);
    naming(location, [&] {
      const Json row = parse_named(line, location);
      const auto number = [&](const char* key) {
        return row.contains(key) && !row[key].is_null() ? row[key].get<double>() : std::nan("");
      };
      metrics.step.push_back(row.at("step").get<double>());
      metrics.loss.push_back(row.at("loss").is_null() ? std::nan("") : number("loss"));
      metrics.tokens_per_s.push_back(number("tokens_per_s"));
      metrics.validation_loss.push_back(number("validation_loss"));
      metrics.validation_unit = row.value("validation_unit", metrics.validation_unit);
      metrics.lr.push_back(number("lr"));
      metrics.grad_norm.push_back(number("grad_norm"));
      const double mfu = number("mfu");  // above 1 in older files: of a peak that was too low
      metrics.mfu.push_back(mfu > 1 ? std::nan("") : mfu);
      metrics.aux_loss.push_back(number("aux_loss"));
      metrics.last_imbalance = row.value("expert_imbalance", std::vector<double>());
      metrics.imbalance.push_back(metrics.last_imbalance.empty()
                                      ? std::nan("")
                                      : *std::ranges::max_element(metrics.last_imbalance));
      if (row.contains("expert_rows")) {
        metrics.load.add(metrics.step.back(),
                         row["expert_rows"].get<std::vector<std::vector<double>>>());
      }
      metrics.sent.set(row);
      metrics.gemm_ms.push_back(number("gemm_ms"));
      metrics.compute_ms.push_back(number("compute_ms"));
      metrics.exposed_comm_ms.push_back(number("exposed_comm_ms"));
      const double step_ms = number("step_ms");
      metrics.step_ms.push_back(std::isnan(step_ms)
                                    ? metrics.compute_ms.back() + metrics.exposed_comm_ms.back()
                                    : step_ms);
      const auto add = [](std::vector<double>& sums, double value) {
        sums.push_back((sums.empty() ? 0 : sums.back()) + value);
      };
      add(metrics.tokens, number("tokens"));
      add(metrics.elapsed_s, metrics.step_ms.back() / 1e3);
    });
  }
  if (metrics.step.empty()) {
    throw IoError(fmt::format("report: {}: is empty, expected one object a step", file.string()));
  }
  return metrics;
}

Json to_array(const std::vector<double>& values) {
  Json array = Json::array();
  for (const double value : values) array.push_back(std::isfinite(value) ? Json(value) : Json());
  return array;
}

}  // namespace tandem::report
