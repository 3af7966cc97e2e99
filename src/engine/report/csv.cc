#include "engine/report/csv.h"

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/lines.h"
#include "engine/report/runs.h"

namespace tandem::report {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

namespace {

using Row = std::map<std::string, std::string>;

std::string quote(const std::string& cell) {
  if (cell.find_first_of(",\"\r\n") == std::string::npos) return cell;
  std::string quoted = "\"";
  for (const char c : cell) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

/// Cells of `json`, by name; new names are appended to `columns`.
void add_cells(const Json& json, const std::string& prefix, Row& row,
               std::vector<std::string>& columns) {
  for (const auto& [key, value] : json.items()) {
    const std::string name = prefix + key;
    if (value.is_object()) {
      add_cells(value, name + ".", row, columns);
    } else if (value.is_number() || value.is_string() || value.is_boolean()) {
      row[name] = value.is_string() ? value.get<std::string>() : dump_json(value);
      if (std::ranges::find(columns, name) == columns.end()) columns.push_back(name);
    }
  }
}

void append_line(std::string& text, const std::vector<std::string>& columns,
                 const std::function<std::string(const std::string&)>& cell) {
  for (size_t i = 0; i < columns.size(); ++i) {
    if (i > 0) text += ',';
    text += quote(cell(columns[i]));
  }
  text += '\n';
}

}  // namespace

std::string steps_as_csv(std::span<const fs::path> dirs) {
  check_runs(dirs);
  std::vector<std::string> columns;
  if (dirs.size() > 1) columns.emplace_back("run");
  std::vector<Row> rows;
  for (const fs::path& dir : dirs) {
    const std::string log = (dir / "metrics.jsonl").string();
    const size_t before = rows.size();
    for (const std::string_view line : Lines(read_file(log))) {
      const Json step = parse_json_exactly(line);
      if (!step.is_object() || !step.contains("step")) continue;  // a line that is being written
      Row& row = rows.emplace_back();
      add_cells(step, "", row, columns);
      if (dirs.size() > 1) row["run"] = name_of_run(dir);
    }
    if (rows.size() == before) throw IoError(log + ": no step: expected those of a run");
  }
  std::string text;
  append_line(text, columns, [](const std::string& name) { return name; });
  for (const Row& row : rows) {
    append_line(text, columns, [&](const std::string& name) {
      const auto found = row.find(name);
      return found == row.end() ? std::string() : found->second;
    });
  }
  return text;
}

}  // namespace tandem::report
