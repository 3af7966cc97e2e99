#include "engine/report/report.h"

#include "core/system/files.h"
#include "core/system/json.h"
#include "engine/report/page_text.h"
#include "engine/report/report_data.h"

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

std::string write_report(const std::filesystem::path& dir, const report::GoalReader& read_goal) {
  const report::Json data = report::collect(dir, read_goal);
  replace_file(dir / "summary.json", dump(data.at("summary"), 1) + "\n");
  replace_file(dir / "report.html", report_page(inside_script(dump(data))));
  return report::as_text(data.at("summary"));
}

}  // namespace tandem
