// Added tokens of a model's folder that its tokenizer's file does not have.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/system/files.h"
#include "core/system/printable.h"
#include "engine/tokenizer/open.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Whether a token of SentencePiece stands before or after each text, and the space that only a
/// text's begin has.
void apply_switches(const SideFiles& side, TokenizerSpec& spec) {
  const auto id_of = [&](const char* role) {
    const auto name = spec.special_tokens.find(role);
    return name == spec.special_tokens.end() ? -1 : spec.find(name->second);
  };
  const auto set = [&](std::optional<bool> is_on, const char* role, std::vector<int32_t>& tokens) {
    if (!is_on) return;
    tokens.clear();
    if (const int32_t id = id_of(role); *is_on && id >= 0) tokens.push_back(id);
  };
  set(side.adds_bos, "bos_token", spec.before);
  set(side.adds_eos, "eos_token", spec.after);
  if (side.is_legacy.value_or(true)) return;
  for (Normalization& step : spec.normalizations) {
    if (!step.rules) continue;
    NormalizerSpec rules = *step.rules;
    rules.only_first = true;
    step.rules = std::make_shared<const NormalizerSpec>(std::move(rules));
  }
}

using Ids = std::unordered_map<std::string, int32_t>;

Ids ids_of(const TokenizerSpec& spec) {
  Ids ids(spec.ids.begin(), spec.ids.end());
  for (size_t id = 0; id < spec.texts.size(); ++id) {
    if (spec.texts[id].is_token) ids.emplace(spec.texts[id].bytes, int32_t(id));
  }
  return ids;
}

/// The token's number: in the tokenizer's file, or else as the side files say; -1 if none does.
int32_t choose_id(const SideToken& token, const Ids& ids, int64_t max_id) {
  if (const auto known = ids.find(token.content); known != ids.end()) return known->second;
  if (token.id <= max_id) return token.id;
  throw ConfigError(fmt::format("added token {} has the number {}: expected at most {}",
                                printable(token.content), token.id, max_id));
}

}  // namespace

void add_side_tokens(const SideFiles& side, TokenizerSpec& spec) {
  for (const auto& [role, name] : side.special_tokens) {
    name.empty() ? void(spec.special_tokens.erase(role)) : void(spec.special_tokens[role] = name);
  }
  std::set<std::string> known;
  for (const AddedToken& token : spec.added) known.insert(token.content);
  std::vector<SideToken> tokens = side.added;
  if (spec.has_bos_switch && side.has_tokenizer_config) {
    for (const auto& [role, name] : spec.special_tokens) {
      tokens.push_back({.content = name, .is_special = true});
    }
  }
  const int64_t max_id = max_token_id(spec.texts.size() + tokens.size());
  const Ids ids = ids_of(spec);
  std::string changes;
  for (const SideToken& token : tokens) {
    if (!known.insert(token.content).second) continue;
    const int32_t id = choose_id(token, ids, max_id);
    if (id < 0) continue;
    // Symbols of SentencePiece are found in the text as it is.
    const bool is_normalized = token.is_normalized && !spec.has_bos_switch;
    spec.added.push_back({token.content, id, token.is_special, token.takes_before,
                          token.takes_after, is_normalized, token.is_single_word});
    add_token_text(spec, id, token.content, token.is_special);
    spec.texts[size_t(id)].first_bytes = token.content;
    spec.texts[size_t(id)].keeps_space = true;
    spec.ids.insert_or_assign(token.content, id);
    changes += fmt::format("{} {} {} {} {} {}{}\n", id, token.content, token.is_special,
                           token.takes_before, token.takes_after, is_normalized,
                           token.is_single_word ? " single" : "");
  }
  if (spec.has_bos_switch) {
    apply_switches(side, spec);
    if (!side.is_legacy.value_or(true)) changes += "not legacy\n";
  }
  if (!changes.empty()) spec.name += " with " + content_hash(changes);
  for (const char* role : {"bos_token", "eos_token"}) {
    const auto name = spec.special_tokens.find(role);
    if (spec.separator >= 0 || name == spec.special_tokens.end()) continue;
    spec.separator = spec.find(name->second);
  }
}

}  // namespace tandem
