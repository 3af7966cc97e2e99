#include "engine/infer/sampling/generation_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "core/system/files.h"
#include "core/system/json.h"
#include "engine/model/config_value.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kEnd = "eos_token_id";
constexpr const char* kPenalty = "repetition_penalty";
constexpr int64_t kDefaultTopK = 50;  // of transformers, if it samples
constexpr size_t kMaxEnds = 1000;

/// Keys that are read, or have no effect on the text of one sequence.
constexpr std::string_view kKnown[] = {"_from_model_config",
                                       "bos_token_id",
                                       kEnd,
                                       "pad_token_id",
                                       "do_sample",
                                       "temperature",
                                       "top_k",
                                       "top_p",
                                       kPenalty,
                                       "transformers_version",
                                       "use_cache",
                                       "output_attentions",
                                       "output_hidden_states"};

Json parse_object(const std::string& file) {
  Json root = parse_json<Json>(read_small_file(file));
  if (!root.is_object()) throw ConfigError(file + ": expected a JSON object");
  return root;
}

int32_t parse_token(const Json& value, const std::string& file) {
  const auto token = parse_value<int64_t>(value, kEnd, file);
  if (token < 0 || token > std::numeric_limits<int32_t>::max()) {
    reject_value(file, kEnd, value, "tokens from 0 to 2^31 - 1");
  }
  return int32_t(token);
}

std::vector<int32_t> parse_ends(const Json& root, const std::string& file) {
  const Json value = root.value(kEnd, Json());
  if (value.is_null()) return {};
  if (!value.is_array()) return {parse_token(value, file)};
  if (value.size() > kMaxEnds) {
    throw ConfigError(
        fmt::format("{}: {}: {} tokens: expected at most {}", file, kEnd, value.size(), kMaxEnds));
  }
  std::vector<int32_t> eos_token_ids;
  for (const Json& each : value) eos_token_ids.push_back(parse_token(each, file));
  return eos_token_ids;
}

void note_unread(const Json& root, const std::string& file,
                 const std::function<void(const std::string&)>& note) {
  std::vector<std::string> unread;
  for (const auto& [key, value] : root.items()) {
    if (value.is_null() || std::ranges::find(kKnown, key) != std::end(kKnown)) continue;
    unread.push_back(printable(key));
  }
  if (unread.empty()) return;
  note(fmt::format("{}: not applied: {}", file, fmt::join(unread, ", ")));
}

template <typename T>
T parse_or(const Json& root, const char* key, const std::string& file, T absent) {
  const Json value = root.value(key, Json());
  return value.is_null() ? absent : parse_value<T>(value, key, file);
}

}  // namespace

GenerationDefaults read_generation_defaults(const StoredModel& stored,
                                            const std::function<void(const std::string&)>& note) {
  GenerationDefaults defaults;
  const std::string file = stored.side.folder + "/generation_config.json";
  const Json& root = stored.side.generation;
  if (!root.is_null()) {
    defaults.eos_token_ids = parse_ends(root, file);
    const bool samples = parse_or(root, "do_sample", file, false);
    defaults.temperature = samples ? parse_or(root, "temperature", file, 1.0) : 0;
    defaults.top_k = samples ? parse_or(root, "top_k", file, kDefaultTopK) : 0;
    defaults.top_p = samples ? parse_or(root, "top_p", file, 1.0) : 1;
    defaults.rules.repetition_penalty = parse_or(root, kPenalty, file, 1.0);
    note_unread(root, file, note);
  }
  if (defaults.eos_token_ids.empty()) {
    const std::string model = stored.directory + "/config.json";
    defaults.eos_token_ids = parse_ends(parse_object(model), model);
  }
  const auto end = stored.side.special_tokens.find("eos_token");
  if (!stored.tokenizer || end == stored.side.special_tokens.end()) return defaults;
  const int32_t token = end->second.empty() ? -1 : stored.tokenizer->find(end->second);
  const bool ends_already = defaults.eos_token_ids.empty()
                                ? stored.tokenizer->is_special(token)
                                : std::ranges::count(defaults.eos_token_ids, token) > 0;
  if (token >= 0 && !ends_already) defaults.eos_token_ids.push_back(token);
  return defaults;
}

}  // namespace tandem
