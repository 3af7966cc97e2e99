#include "engine/plan/fit/run_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>

#include "core/system/files.h"
#include "core/system/nearest.h"
#include "core/system/printable.h"
#include "engine/plan/known_models.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

using Fields = std::vector<std::string>;
using TextMember = std::string RunRow::*;
using NumberMember = double RunRow::*;

const std::map<std::string_view, TextMember>& text_columns() {
  static const std::map<std::string_view, TextMember> columns{{"id", &RunRow::id},
                                                              {"group", &RunRow::group},
                                                              {"model", &RunRow::model},
                                                              {"gpu", &RunRow::gpu},
                                                              {"precision", &RunRow::precision},
                                                              {"sharding", &RunRow::sharding},
                                                              {"recompute", &RunRow::recompute},
                                                              {"basis", &RunRow::basis},
                                                              {"software", &RunRow::software},
                                                              {"notes", &RunRow::notes}};
  return columns;
}

const std::map<std::string_view, NumberMember>& number_columns() {
  static const std::map<std::string_view, NumberMember> columns{
      {"layers", &RunRow::layers},
      {"hidden", &RunRow::hidden},
      {"heads", &RunRow::heads},
      {"kv_heads", &RunRow::kv_heads},
      {"ffn", &RunRow::ffn},
      {"vocab", &RunRow::vocab},
      {"seq", &RunRow::seq},
      {"gpus", &RunRow::gpus},
      {"tp", &RunRow::tp},
      {"pp", &RunRow::pp},
      {"cp", &RunRow::cp},
      {"ep", &RunRow::ep},
      {"dp", &RunRow::dp},
      {"vpp", &RunRow::vpp},
      {"mbs", &RunRow::mbs},
      {"gbs", &RunRow::gbs},
      {"grad_accum", &RunRow::grad_accum}};
  return columns;
}

/// Splits a record at `begin` into fields; quotes may enclose commas, line ends and doubled
/// quotes. Returns the position after its line end.
size_t split_record(std::string_view text, size_t begin, Fields& fields, bool& closed) {
  fields.assign(1, "");
  bool quoted = false;
  size_t at = begin;
  for (; at < text.size(); ++at) {
    const char c = text[at];
    if (quoted) {
      if (c != '"') {
        fields.back() += c;
      } else if (at + 1 < text.size() && text[at + 1] == '"') {
        fields.back() += '"';
        ++at;
      } else {
        quoted = false;
      }
    } else if (c == '"' && fields.back().empty()) {
      quoted = true;
    } else if (c == ',') {
      fields.emplace_back();
    } else if (c == '\n') {
      ++at;
      break;
    } else if (c != '\r') {
      fields.back() += c;
    }
  }
  closed = !quoted;
  return at;
}

std::optional<double> parse_number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value))
    return std::nullopt;
  return value;
}

struct Record {
  std::string where;  ///< "rows.csv:12 (id)"
  std::map<std::string_view, std::string_view> values;

  std::string_view text(std::string_view column) const {
    const auto found = values.find(column);
    return found == values.end() ? std::string_view{} : found->second;
  }
  /// 0 if empty. Throws if it is no positive number.
  double number(std::string_view column) const {
    const std::string_view value = text(column);
    if (value.empty()) return 0;
    const auto parsed = parse_number(value);
    if (!parsed || *parsed <= 0 || *parsed > 1e18) {
      throw InvalidArgument(fmt::format("{}: column {}: {}: expected a positive number or nothing",
                                        where, column, printable(value)));
    }
    return *parsed;
  }
};

/// "128/8", "256/8 + 1 shared"
void parse_experts(const Record& record, RunRow& row) {
  const std::string_view text = record.text("experts_topk");
  if (text.empty()) return;
  const size_t slash = text.find('/'), space = text.find(' ');
  const auto experts = parse_number(text.substr(0, slash));
  const auto top_k = slash == text.npos
                         ? std::nullopt
                         : parse_number(text.substr(
                               slash + 1, space == text.npos ? text.npos : space - slash - 1));
  if (!experts || !top_k || *experts < 1 || *top_k < 1 || *top_k > *experts) {
    throw InvalidArgument(
        fmt::format("{}: column experts_topk: {}: expected EXPERTS/TOPK, as in 128/8", record.where,
                    printable(text)));
  }
  row.experts = *experts;
  row.top_k = *top_k;
  if (const size_t plus = text.find("+ "); plus != text.npos)
    row.shared_experts = parse_number(text.substr(plus + 2, 1)).value_or(0);
}

/// Number before `unit` in the notes, after `word`: "allocated 66.55 GiB".
double noted(std::string_view notes, std::string_view word, std::string_view unit) {
  const size_t at = notes.find(word);
  if (at == notes.npos) return 0;
  const size_t begin = at + word.size(), end = notes.find(unit, begin);
  return end == notes.npos ? 0 : parse_number(notes.substr(begin, end - begin)).value_or(0);
}

/// FLOPs of a token as Megatron counts them: attention not halved for causality.
double megatron_flops_per_token(const RunRow& row) {
  return flops_per_token(row) + 6 * row.layers * row.heads * row.head_dim * row.seq;
}

void derive_step(const Record& record, RunRow& row) {
  const double step = record.number("step_s"), tokens_s_gpu = record.number("tokens_s_gpu"),
               common = record.number("tflops_common"), printed = record.number("tflops_gpu");
  if (step > 0) {
    row.step_s = step;
    return;
  }
  row.step_derived = true;
  if (!row.skipped.empty() || row.gpus == 0) return;
  const double tokens = row.tokens() / row.gpus;
  if (tokens_s_gpu > 0) {
    row.step_s = tokens / tokens_s_gpu;
  } else if (common > 0) {
    row.step_s = tokens * flops_per_token(row) / (1e12 * common);
  } else if (printed > 0 && row.experts == 0 && row.basis == "model FLOPs") {
    row.step_s = tokens * megatron_flops_per_token(row) / (1e12 * printed);
  }
}

std::string reason_to_skip(const Record& record, const RunRow& row) {
  if (row.notes.find("LoRA") != std::string::npos) return "adapters only (LoRA)";
  if (row.model.find("Mamba") != std::string::npos) return "hybrid model";
  for (const auto& [column, value] : {std::pair{"layers", row.layers},
                                      {"hidden", row.hidden},
                                      {"heads", row.heads},
                                      {"ffn", row.ffn},
                                      {"vocab", row.vocab},
                                      {"seq", row.seq},
                                      {"gpus", row.gpus},
                                      {"gbs", row.gbs}}) {
    if (value == 0) return fmt::format("no {}", column);
  }
  if (record.text("tp").empty() && record.text("pp").empty()) return "no layout";
  return "";
}

/// Stages per rank and microbatches of a pipeline that the row leaves open.
void complete_pipeline(RunRow& row, bool has_microbatch) {
  const bool is_torchtitan = row.software.starts_with("torchtitan");
  if (row.vpp == 0 && row.notes.starts_with("1F1B")) row.vpp = 1;
  // Its defaults: as many microbatches as pipeline ranks, and two stages each if interleaved.
  if (is_torchtitan && !has_microbatch) row.mbs = std::max(1.0, row.gbs / row.dp / row.pp);
  // The finest interleaving that the layers allow: what recipes that leave it open use.
  const double finest = std::max(1.0, std::round(row.layers / row.pp));
  if (row.vpp == 0) row.vpp = is_torchtitan ? std::min(2.0, finest) : finest;
}

/// Degrees and microbatches that the row leaves open.
void complete_layout(RunRow& row) {
  const bool has_microbatch = row.mbs > 0;
  for (double* degree : {&row.tp, &row.pp, &row.cp, &row.ep, &row.mbs}) {
    if (*degree == 0) *degree = 1;
  }
  if (!row.skipped.empty()) return;
  const double ranks = row.tp * row.pp * row.cp;
  if (ranks > row.gpus) {
    row.skipped = fmt::format("tp x pp x cp is {:g} of {:g} gpus", ranks, row.gpus);
    return;
  }
  row.dp = row.gpus / ranks;  // pages print dp with and without cp
  if (row.pp > 1) complete_pipeline(row, has_microbatch);
  if (row.vpp == 0) row.vpp = 1;
  if (row.grad_accum == 0) row.grad_accum = std::max(1.0, row.gbs / (row.dp * row.mbs));
}

RunRow make_row(const Record& record) {
  RunRow row;
  for (const auto& [column, member] : text_columns()) row.*member = record.text(column);
  for (const auto& [column, member] : number_columns()) row.*member = record.number(column);
  parse_experts(record, row);
  complete_model(row);
  row.memory_gib = noted(row.notes, "allocated ", " GiB");
  row.skipped = reason_to_skip(record, row);
  complete_layout(row);
  derive_step(record, row);
  return row;
}

std::string number_text(double value) {
  return fmt::format("{:g}", value);
}

}  // namespace

std::vector<RunRow> parse_rows(std::string_view text, const std::string& path) {
  const std::string file = single_line(path);
  text = without_bom(text);
  Fields names, fields;
  bool closed = true;
  size_t at = split_record(text, 0, names, closed);
  for (const std::string_view column : {"model", "gpu", "gpus", "precision", "seq", "gbs"}) {
    if (std::ranges::find(names, column) == names.end()) {
      throw InvalidArgument(fmt::format(
          "{}: no column {}: expected a CSV file with the columns of bench/published/runs.csv",
          file, column));
    }
  }
  std::vector<RunRow> rows;
  int64_t line = 1 + std::ranges::count(text.substr(0, at), '\n');
  while (at < text.size()) {
    const size_t begin = at;
    at = split_record(text, begin, fields, closed);
    const int64_t first_line = line;
    line += std::ranges::count(text.substr(begin, at - begin), '\n');
    if (fields.size() == 1 && fields[0].empty()) continue;
    Record record{fmt::format("{}:{}", file, first_line), {}};
    if (!closed)
      throw InvalidArgument(record.where + ": a quote without end: expected one more \"");
    if (fields.size() != names.size()) {
      throw InvalidArgument(fmt::format("{}: {} fields: expected {}, as in the first line",
                                        record.where, fields.size(), names.size()));
    }
    for (size_t i = 0; i < names.size(); ++i) record.values[names[i]] = fields[i];
    if (!record.text("id").empty())
      record.where += fmt::format(" ({})", printable(record.text("id")));
    rows.push_back(make_row(record));
    if (rows.back().id.empty()) rows.back().id = fmt::format("line {}", first_line);
  }
  if (rows.empty())
    throw InvalidArgument(file + ": no rows: expected at least one below the names");
  return rows;
}

std::vector<RunRow> read_rows(const std::string& path) {
  return parse_rows(read_file(path), path);
}

double flops_per_token(const RunRow& row) {
  const double width = row.heads * row.head_dim;
  const double attention = row.attention_weights > 0
                               ? row.attention_weights
                               : 2 * row.hidden * width * (1 + row.kv_heads / row.heads);
  const double matrices = row.gated ? 3 : 2;
  const double used = row.experts > 0 ? row.top_k + row.shared_experts : 1;
  const double layer = attention + matrices * row.hidden * row.ffn * used;
  return 6 * (row.layers * layer + row.hidden * row.vocab) + 6 * row.layers * width * row.seq;
}

std::string column_text(const RunRow& row, std::string_view column) {
  if (const auto text = text_columns().find(column); text != text_columns().end())
    return row.*text->second;
  if (const auto number = number_columns().find(column); number != number_columns().end())
    return number_text(row.*number->second);
  std::vector<std::string> names;
  for (const auto& [name, member] : text_columns()) names.emplace_back(name);
  for (const auto& [name, member] : number_columns()) names.emplace_back(name);
  const std::string close = nearest(std::string(column), names);
  throw InvalidArgument(fmt::format(
      "{}: no such column{}", printable(column),
      close.empty() ? ": expected model, group, gpu, gpus, …" : ": did you mean " + close + "?"));
}

RowFilter::RowFilter(std::string_view conditions) {
  while (!conditions.empty()) {
    const std::string_view text = conditions.substr(0, conditions.find(','));
    conditions.remove_prefix(std::min(conditions.size(), text.size() + 1));
    const size_t at = text.find_first_of("=!<>");
    if (at == text.npos || at == 0) {
      throw InvalidArgument(
          fmt::format("{}: expected COLUMN=VALUE, or != <= >= < >, as in gpu=H100,gpus<=1024",
                      printable(text)));
    }
    const size_t end =
        at + (at + 1 < text.size() && text[at] != '=' && text[at + 1] == '=' ? 2 : 1);
    Condition condition{std::string(text.substr(0, at)), std::string(text.substr(at, end - at)),
                        std::string(text.substr(end))};
    column_text(RunRow{}, condition.column);
    const bool equality = condition.comparison == "=" || condition.comparison == "!=";
    if (condition.comparison == "!" || (!equality && !parse_number(condition.value))) {
      throw InvalidArgument(
          fmt::format("{}: expected a number after {}", printable(text), condition.comparison));
    }
    conditions_.push_back(std::move(condition));
  }
}

bool RowFilter::matches(const RunRow& row) const {
  return std::ranges::all_of(conditions_, [&](const Condition& condition) {
    const std::string text = column_text(row, condition.column);
    const auto number = parse_number(text), bound = parse_number(condition.value);
    const bool equal = number && bound ? *number == *bound : text.starts_with(condition.value);
    if (condition.comparison == "=") return equal;
    if (condition.comparison == "!=") return !equal;
    if (!number || !bound) return false;
    if (condition.comparison == "<=") return *number <= *bound;
    if (condition.comparison == ">=") return *number >= *bound;
    return condition.comparison == "<" ? *number < *bound : *number > *bound;
  });
}

}  // namespace tandem::plan
