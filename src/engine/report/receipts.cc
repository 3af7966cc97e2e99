#include "engine/report/receipts.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/system/printable.h"
#include "engine/report/metrics_file.h"

namespace tandem::report {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxLines = 8;

std::string text(const Json& row, const char* field) {
  return row.at(field).get<std::string>();
}
bool asks_for_overlap(const Json& row) {
  return text(row, "asked") != "serial";
}
bool ran_as_asked(const Json& row) {
  return !asks_for_overlap(row) || text(row, "ran") == "overlapped";
}

std::string describe(const Json& row) {
  const auto group = row.at("group").get<int64_t>(), calls = row.at("calls").get<int64_t>();
  return fmt::format("did not overlap: {}: {}, {} rank{}: {} ran as {}: {} ({} call{})",
                     text(row, "op"), text(row, "shape"), group, group == 1 ? "" : "s",
                     text(row, "asked"), text(row, "ran"), text(row, "why"), calls,
                     calls == 1 ? "" : "s");
}

}  // namespace

Json read_receipts(const std::string& dir) {
  const std::string file = dir + "/receipts.json";
  const auto content = read_if_there(file);
  if (!content) return Json::array();
  return naming(file, [&] {
    Json rows = parse_named(*content, file);
    for (const Json& row : rows) {
      describe(row);  // throws for missing fields
      const std::string ran = text(row, "ran");
      if (ran == "overlapped" || ran == "serial") continue;
      throw IoError(fmt::format("report: {}: ran '{}': expected overlapped or serial",
                                printable(file), printable(ran)));
    }
    return rows;
  });
}

std::vector<std::string> describe_receipts(const Json& rows) {
  std::vector<const Json*> others;
  size_t asked = 0;
  for (const Json& row : rows) {
    asked += asks_for_overlap(row);
    if (!ran_as_asked(row)) others.push_back(&row);
  }
  if (asked == 0) return {};
  if (others.empty()) {
    return {fmt::format("operators: all {} that were asked to overlap did", asked)};
  }
  std::ranges::stable_sort(others, std::greater<>(),
                           [](const Json* row) { return row->at("calls").get<int64_t>(); });
  std::vector<std::string> lines;
  for (const Json* row : others) {
    if (lines.size() == kMaxLines) break;
    lines.push_back(describe(*row));
  }
  if (others.size() > kMaxLines) {
    lines.back() += fmt::format("; and {} more", others.size() - kMaxLines);
  }
  return lines;
}

}  // namespace tandem::report
