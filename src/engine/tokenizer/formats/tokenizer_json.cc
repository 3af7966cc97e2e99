// Hugging Face's tokenizer.json.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/system/printable.h"
#include "engine/tokenizer/json_field.h"
#include "engine/tokenizer/open.h"
#include "engine/tokenizer/unicode/byte_characters.h"
#include "engine/tokenizer/unicode/unicode.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using nlohmann::json;

constexpr const char* kWordPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// \w+|[^\w\s]+, where \w holds Unicode's alphabetic characters and joiners, too.
constexpr const char* kWordsOrSymbols =
    "[\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\u200c\u200d\u24b6-\u24e9\U0001f130-\U0001f149"
    "\U0001f150-\U0001f169\U0001f170-\U0001f189]+|"
    "[^\\s\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\u200c\u200d\u24b6-\u24e9\U0001f130-\U0001f149"
    "\U0001f150-\U0001f169\U0001f170-\U0001f189]+";
constexpr int64_t kMaxLength = 1000;

constexpr const char* kIdRange = "a number from 0 that fits the size of the vocabulary";

/// Pattern of one punctuation character.
Pattern punctuation() {
  std::string regex = "[";
  for (size_t i = 0; i < unicode::kNumPunctuation; ++i) {
    const unicode::CodeRange& range = unicode::kPunctuation[i];
    regex += fmt::format("\\x{{{:x}}}-\\x{{{:x}}}", range.first, range.last);
  }
  return Pattern(regex + "]");
}

class Reader {
 public:
  explicit Reader(const json& root) : root_{root, "tokenizer"} {}

  TokenizerSpec read() {
    for (const char* name : {"truncation", "padding"}) {  // transformers applies them on request
      if (!top(name).is_null()) spec_.notes.push_back(std::string(name) + " is not applied");
    }
    read_words();
    read_vocabulary();
    read_added();
    read_normalizers();
    read_decoder();
    read_template();
    choose_separator();
    spec_.name = "tokenizer.json";
    return std::move(spec_);
  }

 private:
  Field top(const char* name) const { return {member(root_.value, name), name}; }

  void read_words() {
    const std::vector<Field> steps = steps_of(top("pre_tokenizer"), "pretokenizers");
    for (const Field& step : steps) {
      const std::string type = step["type"].text();
      if (of_bytes_) refuse(step.key, step["type"].value, "nothing after ByteLevel");
      if (type == "ByteLevel") {
        add_byte_level(step);
      } else if (type == "Split") {
        add_split(step);
      } else if (type == "Digits") {
        const bool each = step["individual_digits"].flag(false);
        spec_.steps.push_back(split_step(Pattern(each ? "\\p{N}" : "\\p{N}+")));
      } else if (type == "Metaspace") {
        add_metaspace(step);
      } else if (!add_named_split(step, type)) {
        refuse(step.key + ".type", step["type"].value,
               "BertPreTokenizer, ByteLevel, CharDelimiterSplit, Digits, FixedLength, Metaspace, "
               "Punctuation, Split, Whitespace or WhitespaceSplit");
      }
    }
  }

  static WordStep split_step(Pattern pattern) {
    return {WordStep::Kind::split, std::move(pattern)};
  }

  void add_byte_level(const Field& step) {
    of_bytes_ = true;
    if (step["add_prefix_space"].flag(true)) spec_.steps.push_back({WordStep::Kind::prefix});
    if (step["use_regex"].flag(true)) spec_.steps.push_back(split_step(Pattern(kWordPattern)));
  }

  void add_split(const Field& step) {
    WordStep split = split_step(read_pattern(step["pattern"]));
    split.is_inverted = step["invert"].flag(false);
    set_behavior(step["behavior"], step["behavior"].text(), split);
    spec_.steps.push_back(std::move(split));
  }

  static void set_behavior(const Field& field, const std::string& behavior, WordStep& split) {
    if (behavior == "Removed") {
      (split.is_inverted ? split.keeps_gaps : split.keeps_matches) = false;
    } else if (behavior == "MergedWithPrevious") {
      split.joins = WordStep::Joins::previous;
    } else if (behavior == "MergedWithNext") {
      split.joins = WordStep::Joins::next;
    } else if (behavior == "Contiguous") {
      split.joins = WordStep::Joins::matches;
    } else if (behavior != "Isolated") {
      refuse(field.key, field.value,
             "Contiguous, Isolated, MergedWithNext, MergedWithPrevious or Removed");
    }
  }

  void add_removed(Pattern pattern) {
    spec_.steps.push_back(split_step(std::move(pattern)));
    spec_.steps.back().keeps_matches = false;
  }

  /// Splits at what their name says; false for another name.
  bool add_named_split(const Field& step, const std::string& type) {
    if (type == "WhitespaceSplit") {
      add_removed(Pattern("\\s+"));
    } else if (type == "Whitespace") {
      spec_.steps.push_back(split_step(Pattern(kWordsOrSymbols)));
      spec_.steps.back().keeps_gaps = false;
    } else if (type == "CharDelimiterSplit") {
      add_removed(Pattern::literal(step["delimiter"].text()));
    } else if (type == "Punctuation" || type == "BertPreTokenizer") {
      if (type == "BertPreTokenizer") add_removed(Pattern("\\s+"));
      WordStep split = split_step(punctuation());
      const Field behavior = step["behavior"];
      set_behavior(behavior, behavior.is_null() ? "Isolated" : behavior.text(), split);
      spec_.steps.push_back(std::move(split));
    } else if (type == "FixedLength") {
      const int64_t length = step["length"].number();
      if (length < 1 || length > kMaxLength)
        refuse(step.key + ".length", step["length"].value, "1 to 1000");
      spec_.steps.push_back(split_step(Pattern(fmt::format("[\\s\\S]{{1,{}}}", length))));
    } else {
      return false;
    }
    return true;
  }

  WordStep::Prepend read_prepend(const Field& field) {
    const std::string scheme = field["prepend_scheme"].is_null()
                                   ? (field["add_prefix_space"].flag(true) ? "always" : "never")
                                   : field["prepend_scheme"].text();
    if (scheme == "always") return WordStep::Prepend::always;
    if (scheme == "first") return WordStep::Prepend::first;
    if (scheme != "never") {
      refuse(field.key + ".prepend_scheme", field["prepend_scheme"].value,
             "always, first or never");
    }
    return WordStep::Prepend::never;
  }

  void add_metaspace(const Field& field) {
    WordStep step{WordStep::Kind::metaspace};
    step.space = field["replacement"].text();
    if (step.space.empty())
      refuse(field.key + ".replacement", field["replacement"].value, "a text");
    step.prepend = read_prepend(field);
    step.splits = field["split"].flag(true);
    spec_.steps.push_back(std::move(step));
  }

  void read_vocabulary() {
    const Field model = top("model");
    const std::string type = model["type"].is_null() ? "BPE" : model["type"].text();
    if (type == "Unigram") return read_unigram(model);
    if (type != "BPE") refuse("model.type", model["type"].value, "BPE or Unigram");
    for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
      model.require_empty(name);
    }
    const Field vocab = model["vocab"];
    if (!vocab.value.is_object()) refuse(vocab.key, vocab.value, "an object");
    max_id_ = max_token_id(vocab.value.size() + top("added_tokens").value.size());
    for (const auto& [text, id] : vocab.value.items()) {
      if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > max_id_) {
        refuse(fmt::format("model.vocab[\"{}\"]", printable(text)), id, kIdRange);
      }
      ids_[text] = int32_t(id.get<int64_t>());
    }
    BpeModel& bpe = spec_.bpe;
    bpe.by_character = !of_bytes_;
    bpe.whole_words_first = model["ignore_merges"].flag(false);
    bpe.fuses_unknown = model["fuse_unk"].flag(false);
    if (!model["unk_token"].is_null()) bpe.unknown = id_of(model["unk_token"].text(), "unk_token");
    if (of_bytes_) {
      for (const auto& [text, id] : ids_) {
        const std::optional<std::string> bytes = bytes_of_characters(text);
        if (!bytes) continue;
        bpe.tokens[*bytes] = id;
        if (bytes->size() == 1) bpe.bytes[uint8_t((*bytes)[0])] = id;
      }
    } else {
      bpe.tokens = ids_;
      if (model["byte_fallback"].flag(false)) read_byte_tokens();
    }
    read_merges(model["merges"]);
  }

  void read_unigram(const Field& model) {
    if (of_bytes_) refuse("pre_tokenizer", top("pre_tokenizer").value, "no ByteLevel of Unigram");
    const std::vector<Field> vocab = model["vocab"].list();
    max_id_ = max_token_id(vocab.size() + top("added_tokens").value.size());
    UnigramModel unigram;
    unigram.sums = UnigramModel::Sums::tokenizers;
    double min_score = 0;
    for (const Field& item : vocab) {
      const bool is_pair = item.value.is_array() && item.value.size() == 2 &&
                           item.value[0].is_string() && item.value[1].is_number();
      if (!is_pair) refuse(item.key, item.value, "a text and its score");
      const auto id = int32_t(unigram.tokens.size());
      unigram.tokens.push_back({item.value[0].get<std::string>(), id, item.value[1].get<double>()});
      ids_[unigram.tokens.back().text] = id;
      min_score =
          id == 0 ? unigram.tokens[0].score : std::min(min_score, unigram.tokens.back().score);
    }
    const Field unknown = model["unk_id"];
    const int64_t id = unknown.is_null() ? -1 : unknown.number();
    if (id < 0 || id >= int64_t(vocab.size())) refuse(unknown.key, unknown.value, "a piece");
    unigram.unknown = int32_t(id);
    unigram.unknown_score = min_score - kUnknownPenalty;
    if (model["byte_fallback"].flag(false)) {
      for (size_t byte = 0; byte < 256; ++byte) {
        const auto found = ids_.find(fmt::format("<0x{:02X}>", byte));
        if (found != ids_.end()) unigram.bytes[byte] = found->second;
      }
    }
    spec_.unigram = std::move(unigram);
  }

  void read_byte_tokens() {
    for (size_t byte = 0; byte < 256; ++byte) {
      spec_.bpe.bytes[byte] = id_of(fmt::format("<0x{:02X}>", byte), "byte_fallback");
    }
  }

  int32_t id_of(const std::string& token, std::string_view why) const {
    const auto found = ids_.find(token);
    if (found == ids_.end()) {
      throw ConfigError(
          fmt::format("model.{}: \"{}\" is not in model.vocab", why, printable(token)));
    }
    return found->second;
  }

  void read_merges(const Field& merges) {
    if (!merges.value.is_array()) refuse(merges.key, merges.value, "a list");
    int32_t rank = 0;
    for (const json& merge : merges.value) {
      std::string left, right;
      const bool is_pair =
          merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string();
      if (is_pair) {
        left = merge[0].get<std::string>(), right = merge[1].get<std::string>();
      } else if (merge.is_string()) {
        const auto text = merge.get<std::string>();
        const size_t space = text.find(' ');
        if (space == text.npos || text.find(' ', space + 1) != text.npos) {
          refuse(fmt::format("model.merges[{}]", rank), merge, "two tokens");
        }
        left = text.substr(0, space), right = text.substr(space + 1);
      } else {
        refuse(fmt::format("model.merges[{}]", rank), merge, "two tokens");
      }
      const std::string why = fmt::format("merges[{}]", rank);
      spec_.bpe.merges.push_back(
          {id_of(left, why), id_of(right, why), id_of(left + right, why), rank});
      ++rank;
    }
  }

  void read_added() {
    const Field added = top("added_tokens");
    if (added.is_null()) return;
    for (const Field& item : added.list()) {
      AddedToken token;
      token.content = item["content"].text();
      if (token.content.empty()) refuse(item.key + ".content", item["content"].value, "a text");
      token.is_special = item["special"].flag(false);
      token.takes_before = item["lstrip"].flag(false);
      token.takes_after = item["rstrip"].flag(false);
      token.is_normalized = item["normalized"].flag(!token.is_special);
      token.is_single_word = item["single_word"].flag(false);
      const int64_t id = item["id"].number();
      const auto known = ids_.find(token.content);
      if (id < 0 || id > max_id_ || (known != ids_.end() && known->second != id)) {
        refuse(item.key + ".id", item["id"].value, "its number in model.vocab, or a free one");
      }
      token.id = int32_t(id);
      added_ids_[token.content] = spec_.ids[token.content] = token.id;
      spec_.added.push_back(std::move(token));
    }
  }

  void read_normalizers() {
    for (const Field& step : steps_of(top("normalizer"), "normalizers")) {
      spec_.normalizations.push_back(read_normalization(step));
    }
  }

  struct Decoding {
    bool of_bytes = false, byte_tokens = false;
    std::vector<std::pair<std::string, std::string>> replacements;
    std::string first_drops;  ///< a character that a text's first token loses
  };

  void read_decoder() {
    Decoding how;
    const std::vector<Field> steps = steps_of(top("decoder"), "decoders");
    if (steps.empty()) refuse("decoder", top("decoder").value, "a decoder");
    for (const Field& step : steps) {
      const std::string type = step["type"].text();
      if (type == "ByteLevel" && steps.size() == 1) {
        how.of_bytes = true;
      } else if (type == "Replace" && !step["pattern"]["String"].is_null()) {
        how.replacements.emplace_back(step["pattern"]["String"].text(), step["content"].text());
      } else if (type == "ByteFallback") {
        how.byte_tokens = true;
      } else if (type == "Metaspace") {
        const std::string space = step["replacement"].text();
        how.replacements.emplace_back(space, " ");
        if (read_prepend(step) != WordStep::Prepend::never) {
          how.first_drops = space;
          spec_.strip = TokenizerSpec::Strip::all;
        }
      } else if (type == "Strip") {
        const bool is_one = step["content"].text() == " " && step["start"].number() == 1 &&
                            step["stop"].number() == 0;
        if (!is_one) refuse(step.key, step.value, "one space from the start");
        spec_.strip = TokenizerSpec::Strip::one;
      } else if (type != "Fuse") {
        refuse(step.key + ".type", step["type"].value,
               "ByteLevel, Metaspace, Replace of a String, ByteFallback, Fuse or Strip");
      }
    }
    for (const auto& [from, to] : how.replacements) {
      if (from.empty()) refuse("decoder", top("decoder").value, "a text to replace");
    }
    if (how.of_bytes != of_bytes_) {
      refuse("decoder", top("decoder").value, of_bytes_ ? "ByteLevel" : "one without ByteLevel");
    }
    for (const auto& [text, id] : ids_) set_text(how, text, id, false);
    for (const AddedToken& token : spec_.added) {
      const bool changes = token.is_normalized;
      const std::string text =
          changes ? normalize(spec_.normalizations, token.content) : token.content;
      set_text(how, text, token.id, token.is_special);
    }
  }

  void set_text(const Decoding& how, const std::string& token, int32_t id, bool is_special) {
    if (how.of_bytes) {
      add_token_text(spec_, id, bytes_of_characters(token).value_or(token), is_special);
      return;
    }
    std::string text = token, first = token;
    if (!how.first_drops.empty()) first = replace_all(first, how.first_drops, "");
    for (const auto& [from, to] : how.replacements) {
      text = replace_all(text, from, to), first = replace_all(first, from, to);
    }
    const std::optional<uint8_t> byte = how.byte_tokens ? byte_of_token(text) : std::nullopt;
    if (byte) text = first = std::string(1, char(*byte));
    add_token_text(spec_, id, std::move(text), is_special);
    spec_.texts[size_t(id)].first_bytes = std::move(first);
  }

  int32_t any_id(const Field& token) const {
    const std::string text = token.text();
    if (const auto found = added_ids_.find(text); found != added_ids_.end()) return found->second;
    return id_of(text, token.key);
  }

  void read_template() {
    for (const Field& step : steps_of(top("post_processor"), "processors")) {
      const std::string type = step["type"].text();
      if (type == "ByteLevel") continue;
      if (type != "TemplateProcessing") {
        refuse(step.key + ".type", step["type"].value, "ByteLevel or TemplateProcessing");
      }
      bool after = false;
      for (const Field& item : step["single"].list()) {
        if (!item["Sequence"].is_null()) {
          if (after) refuse(item.key, item.value, "one Sequence");
          after = true;
          continue;
        }
        const std::string name = item["SpecialToken"]["id"].text("a SpecialToken or a Sequence");
        const Field special{member(step["special_tokens"].value, name.c_str()),
                            step.key + ".special_tokens." + printable(name)};
        for (const Field& id : special["ids"].list()) {
          const int64_t number = id.number();
          if (number < 0 || size_t(number) >= spec_.texts.size()) {
            refuse(id.key, id.value, "a token");
          }
          (after ? spec_.after : spec_.before).push_back(int32_t(number));
        }
      }
      if (!after) refuse(step.key + ".single", step["single"].value, "a Sequence");
    }
  }

  void choose_separator() {
    if (!spec_.before.empty()) {
      spec_.separator = spec_.before[0];
      return;
    }
    for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "<s>", "</s>",
                             "<\uFF5Cbegin\u2581of\u2581sentence\uFF5C>", "<bos>", "<eos>"}) {
      const auto found = added_ids_.find(name);
      if (found == added_ids_.end()) continue;
      spec_.separator = found->second;
      return;
    }
  }

  Field root_;
  TokenizerSpec spec_;
  bool of_bytes_ = false;  ///< ByteLevel
  int64_t max_id_ = 0;
  BpeModel::Vocabulary ids_, added_ids_;
};

}  // namespace

TokenizerSpec parse_tokenizer_json(std::string_view text) {
  json root;
  try {
    root = json::parse(text);
  } catch (const json::exception& failed) {
    throw ConfigError(printable(failed.what(), 160));
  }
  return Reader(root).read();
}

}  // namespace tandem
