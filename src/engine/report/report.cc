#include "engine/report/report.h"

#include <vector>

#include "core/system/files.h"
#include "core/system/json.h"
#include "engine/report/page_text.h"
#include "engine/report/report_data.h"
#include "engine/report/runs.h"

namespace tandem {
namespace {

// Replaces invalid UTF-8; no '<' remains that could end the enclosing script element.
std::string dump(const report::Json& json, int indent = -1) {
  return dump_json(json, indent);
}
std::string inside_script(const std::string& json) {
  std::string out;
  out.reserve(json.size());
  for (const char c : json) c == '<' ? out += "\\u003c" : out += c;
  return out;
}

}  // namespace

std::string write_report(const std::filesystem::path& dir, const report::GoalReader& read_goal,
                         std::span<const std::filesystem::path> others) {
  std::vector<std::filesystem::path> all{dir};
  all.insert(all.end(), others.begin(), others.end());
  report::check_runs(all);
  const report::Json data = report::collect(dir, read_goal, others);
  replace_file(dir / "summary.json", dump(data.at("summary"), 1) + "\n");
  replace_file(dir / "report.html", report_page(inside_script(dump(data))));
  return report::as_text(data.at("summary"));
}

}  // namespace tandem
