#include "engine/data/ledger/ledger_lines.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/printable.h"
#include "engine/model/config.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kHashKey = ",\"hash\":\"", kLineEnd = "\"}";
constexpr size_t kHashDigits = 32;
constexpr size_t kTail = kHashKey.size() + kHashDigits + kLineEnd.size();

/// The line of these entries and of a hash of their text.
std::string seal_line(const ordered_json& entries) {
  std::string text = entries.dump();
  text.pop_back();  // the closing brace
  return fmt::format("{}{}{}{}\n", text, kHashKey, content_hash(text), kLineEnd);
}

uint64_t parse_hex(const std::string& digits) {
  uint64_t value = 0;
  const char* const end = digits.data() + digits.size();
  const auto parsed = std::from_chars(digits.data(), end, value, 16);
  if (parsed.ec == std::errc() && parsed.ptr == end) return value;
  throw IoError(fmt::format("text_hash is {}: expected hexadecimal digits", printable(digits)));
}

/// Sums of two do not overflow.
int64_t integer_from(const ordered_json& line, const char* key, int64_t min) {
  constexpr int64_t kMax = int64_t{1} << 60;
  const ordered_json& value = line.at(key);
  const bool fits = value.is_number_integer() && value >= min && value <= kMax;
  if (fits) return value.get<int64_t>();
  throw IoError(fmt::format("{} is {}: expected an integer from {} to {}", key,
                            printable(value.dump()), min, kMax));
}

std::vector<SampledSource> sources_from(const ordered_json& line) {
  std::vector<SampledSource> sources;
  if (!line.contains("sources")) return sources;
  for (const ordered_json& source : line.at("sources")) {
    const auto weight = source.at("weight").get<double>();
    if (!(weight > 0)) throw IoError(fmt::format("weight is {}: expected above 0", weight));
    sources.push_back({weight, integer_from(source, "windows", 0)});
  }
  return sources;
}

LedgerStart start_from(const ordered_json& line) {
  return {integer_from(line, "step", 0),
          integer_from(line, "next_sample", 0),
          line.at("data").get<std::string>(),
          integer_from(line, "windows", 0),
          integer_from(line, "seq", 1),
          integer_from(line, "seed", 0),
          integer_from(line, "dp", 1),
          integer_from(line, "microbatch", 1),
          integer_from(line, line.contains("replicas") ? "replicas" : "dp", 1),
          sources_from(line)};
}

std::vector<StreamCursor> cursors_from(const ordered_json& line) {
  std::vector<StreamCursor> cursors;
  if (!line.contains("cursors")) return cursors;
  for (const ordered_json& cursor : line.at("cursors")) {
    cursors.push_back({integer_from(cursor, "epoch", 0), integer_from(cursor, "shard", 0),
                       integer_from(cursor, "offset", 0), integer_from(cursor, "position", 0)});
  }
  return cursors;
}

LedgerStep step_from(const ordered_json& line, bool is_skip) {
  return {integer_from(line, "step", 1),
          integer_from(line, "first_sample", 0),
          integer_from(line, "samples", 1),
          integer_from(line, "epoch", 0),
          integer_from(line, "tokens", 0),
          parse_hex(line.at("text_hash").get<std::string>()),
          is_skip ? line.at("reason").get<std::string>() : "",
          cursors_from(line),
          line.contains("no_update") ? line.at("no_update").get<std::string>() : ""};
}

}  // namespace

uint64_t sample_hash(int64_t sample, std::span<const int32_t> tokens,
                     std::span<const int32_t> targets) {
  std::vector<int32_t> with_padding;
  if (std::ranges::find(tokens, -1) != tokens.end()) {
    with_padding.assign(tokens.begin(), tokens.end());
    std::ranges::replace(with_padding, -1, kBos);
    tokens = with_padding;
  }
  const uint64_t hash = XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), uint64_t(sample));
  return XXH3_64bits_withSeed(targets.data(), targets.size_bytes(), hash);
}

std::string to_ledger_line(int64_t number, const LedgerStart& start) {
  ordered_json line{{"line", number},
                    {"record", "start"},
                    {"step", start.step},
                    {"next_sample", start.next_sample},
                    {"data", start.data},
                    {"windows", start.windows},
                    {"seq", start.seq},
                    {"seed", start.seed},
                    {"dp", start.dp},
                    {"microbatch", start.microbatch},
                    {"replicas", start.replicas}};
  for (const SampledSource& source : start.sources) {
    line["sources"].push_back({{"weight", source.weight}, {"windows", source.windows}});
  }
  return seal_line(line);
}

std::string to_ledger_line(int64_t number, const LedgerStep& step) {
  ordered_json line{
      {"line", number},          {"record", step.skip_reason.empty() ? "step" : "skip"},
      {"step", step.step},       {"first_sample", step.first_sample},
      {"samples", step.samples}, {"epoch", step.epoch},
      {"tokens", step.tokens},   {"text_hash", fmt::format("{:016x}", step.text_hash)}};
  if (!step.skip_reason.empty()) line["reason"] = step.skip_reason;
  if (!step.no_update.empty()) line["no_update"] = step.no_update;
  for (const StreamCursor& cursor : step.cursors) {
    line["cursors"].push_back({{"epoch", cursor.epoch},
                               {"shard", cursor.shard},
                               {"offset", cursor.offset},
                               {"position", cursor.position}});
  }
  return seal_line(line);
}

LedgerLine parse_ledger_line(std::string_view line) {
  if (line.size() < kTail || line.substr(line.size() - kTail, kHashKey.size()) != kHashKey) {
    throw IoError("is no line of a ledger");
  }
  const std::string_view text = line.substr(0, line.size() - kTail);
  const std::string_view hash = line.substr(line.size() - kTail + kHashKey.size(), kHashDigits);
  const std::string found = content_hash(text);
  if (hash != found || !line.ends_with(kLineEnd)) {
    throw IoError(fmt::format("was changed after it was written: its hash is {}: expected {}",
                              found, printable(hash)));
  }
  const auto json = parse_json<ordered_json>(line);
  try {
    LedgerLine parsed;
    parsed.number = integer_from(json, "line", 1);
    const auto record = json.at("record").get<std::string>();
    if (record == "start") {
      parsed.record = start_from(json);
    } else if (record == "step" || record == "skip") {
      parsed.record = step_from(json, record == "skip");
    } else {
      throw IoError(fmt::format("record is {}: expected start, step or skip", printable(record)));
    }
    return parsed;
  } catch (const ordered_json::exception& error) {
    throw IoError(error.what());
  }
}

}  // namespace tandem
