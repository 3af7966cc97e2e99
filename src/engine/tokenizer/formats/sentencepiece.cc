// SentencePiece's .model: a protocol buffer (sentencepiece_model.proto).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <memory>
#include <set>
#include <utility>

#include "core/system/printable.h"
#include "engine/tokenizer/open.h"
#include "engine/tokenizer/ranked_tokens.h"
#include "engine/tokenizer/unicode/byte_characters.h"
#include "engine/tokenizer/unicode/unicode.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr std::string_view kSpace = "\u2581";

/// Fields of a message, one after the other.
class Message {
 public:
  Message(std::string_view bytes, std::string_view name) : bytes_(bytes), name_(name) {}

  /// Moves to the next field; false at the end.
  bool next() {
    if (at_ == bytes_.size()) return false;
    const uint64_t key = varint();
    number_ = int(std::min<uint64_t>(key >> 3, 1 << 29));
    kind_ = int(key & 7);
    if (kind_ == 0) {
      value_ = varint();
    } else if (kind_ == 2) {
      text_ = take(varint());
    } else if (kind_ == 1 || kind_ == 5) {
      text_ = take(kind_ == 1 ? 8 : 4);
    } else {
      fail();
    }
    return true;
  }
  int number() const { return number_; }
  std::string_view text() const { return expect(2), text_; }
  uint64_t integer() const { return expect(0), value_; }
  float real() const {
    expect(5);
    uint32_t bits = 0;
    for (size_t i = 0; i < 4; ++i) bits |= uint32_t(uint8_t(text_[i])) << 8 * i;
    return std::bit_cast<float>(bits);
  }

 private:
  [[noreturn]] void fail() const {
    throw ConfigError(fmt::format("{}: is damaged at byte {}", name_, at_));
  }
  void expect(int kind) const {
    if (kind_ != kind) fail();
  }
  std::string_view take(uint64_t bytes) {
    if (bytes > bytes_.size() - at_) fail();
    at_ += bytes;
    return bytes_.substr(at_ - bytes, bytes);
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = uint8_t(take(1)[0]);
      value |= uint64_t(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    fail();
  }

  std::string_view bytes_, name_;
  size_t at_ = 0;
  int number_ = 0, kind_ = 0;
  uint64_t value_ = 0;
  std::string_view text_;
};

enum class TokenType : uint8_t { normal = 1, unknown, control, user_defined, unused, byte };

struct ModelToken {
  std::string text;
  float score = 0;
  TokenType type = TokenType::normal;
};

constexpr int kUnigram = 1, kBpe = 2;

bool is_text(const ModelToken& token) {
  return token.type == TokenType::normal || token.type == TokenType::user_defined ||
         token.type == TokenType::unused;
}

struct Model {
  std::vector<ModelToken> tokens;
  int type = 1;  ///< kUnigram or kBpe
  bool byte_fallback = false, suffix_space = false;
  int32_t bos = 1, eos = 2;
  std::string unknown_surface = " \u2047 ";
  bool add_prefix = true, remove_spaces = true, escapes = true;
  std::optional<CharacterMap> characters;
};

ModelToken read_token(std::string_view bytes, size_t id) {
  ModelToken token;
  const std::string name = fmt::format("piece {}", id);
  for (Message message(bytes, name); message.next();) {
    if (message.number() == 1) token.text = message.text();
    if (message.number() == 2) token.score = message.real();
    if (message.number() != 3) continue;
    const uint64_t type = message.integer();
    if (type < 1 || type > 6) {
      throw ConfigError(fmt::format("piece {}: has the type {}: expected 1 to 6", id, type));
    }
    token.type = TokenType(type);
  }
  if (token.text.empty() || !(token.score == token.score)) {
    throw ConfigError(fmt::format("piece {}: expected a text and a score", id));
  }
  return token;
}

void read_trainer(std::string_view bytes, Model& model) {
  for (Message trainer(bytes, "trainer_spec"); trainer.next();) {
    if (trainer.number() == 3) model.type = int(trainer.integer());
    if (trainer.number() == 24) model.suffix_space = trainer.integer() != 0;
    if (trainer.number() == 35) model.byte_fallback = trainer.integer() != 0;
    if (trainer.number() == 41) model.bos = int32_t(trainer.integer());
    if (trainer.number() == 42) model.eos = int32_t(trainer.integer());
    if (trainer.number() == 44) model.unknown_surface = trainer.text();
  }
}

void read_normalizer(std::string_view bytes, Model& model) {
  for (Message normalizer(bytes, "normalizer_spec"); normalizer.next();) {
    if (normalizer.number() == 2 && !normalizer.text().empty()) {
      model.characters.emplace(normalizer.text());
    }
    if (normalizer.number() == 3) model.add_prefix = normalizer.integer() != 0;
    if (normalizer.number() == 4) model.remove_spaces = normalizer.integer() != 0;
    if (normalizer.number() == 5) model.escapes = normalizer.integer() != 0;
  }
}

void require_no_denormalizer(std::string_view bytes) {
  for (Message spec(bytes, "denormalizer_spec"); spec.next();) {
    if (spec.number() == 2 && !spec.text().empty()) {
      throw ConfigError("denormalizer_spec.precompiled_charsmap has a map: expected none");
    }
  }
}

Model read_model(std::string_view text) {
  Model model;
  for (Message message(text, "model"); message.next();) {
    if (message.number() == 1) {
      model.tokens.push_back(read_token(message.text(), model.tokens.size()));
    }
    if (message.number() == 2) read_trainer(message.text(), model);
    if (message.number() == 3) read_normalizer(message.text(), model);
    if (message.number() == 5) require_no_denormalizer(message.text());
  }
  if (model.type != kUnigram && model.type != kBpe) {
    throw ConfigError(
        fmt::format("trainer_spec.model_type is {}: expected 1 (unigram) or 2 (BPE)", model.type));
  }
  return model;
}

/// Score that sentencepiece 0.2.3 gives a user-defined symbol, so that it is always taken.
double symbol_score(std::string_view text) {
  return double(float(double(text.size()) * .1 - .1));
}

UnigramModel make_unigram(const Model& model) {
  UnigramModel unigram;
  float min_score = std::numeric_limits<float>::max();
  for (const ModelToken& token : model.tokens) {
    if (token.type == TokenType::normal) min_score = std::min(min_score, token.score);
  }
  for (size_t i = 0; i < model.tokens.size(); ++i) {
    const ModelToken& token = model.tokens[i];
    const auto id = int32_t(i);
    if (token.type == TokenType::normal) unigram.tokens.push_back({token.text, id, token.score});
    if (token.type == TokenType::user_defined) {
      unigram.tokens.push_back({token.text, id, symbol_score(token.text)});
    }
    if (token.type == TokenType::unknown) unigram.unknown = id;
  }
  unigram.unknown_score = min_score - float(kUnknownPenalty);
  return unigram;
}

BpeModel make_bpe(const Model& model) {
  BpeModel bpe;
  bpe.by_character = true;
  bpe.fuses_unknown = true;
  std::set<float, std::greater<>> scores;
  for (const ModelToken& token : model.tokens) scores.insert(token.score);
  std::vector<float> by_rank(scores.begin(), scores.end());
  std::vector<RankedToken> ranked;
  for (size_t i = 0; i < model.tokens.size(); ++i) {
    const ModelToken& token = model.tokens[i];
    const auto id = int32_t(i);
    if (token.type == TokenType::unused) {
      throw ConfigError(fmt::format("piece {}: is unused: expected a unigram model", i));
    }
    if (is_text(token)) bpe.tokens.emplace(token.text, id);
    if (token.type == TokenType::normal) {
      const auto rank = std::ranges::lower_bound(by_rank, token.score, std::greater<>());
      ranked.push_back({token.text, id, int32_t(rank - by_rank.begin())});
    }
    if (token.type == TokenType::unknown) bpe.unknown = id;
  }
  bpe.merges = merges_of_tokens(ranked, bpe.tokens, true);
  return bpe;
}

/// Sets the texts of tokens, and returns the tokens of bytes; -1 without byte fallback.
std::array<int32_t, 256> add_texts(const Model& model, TokenizerSpec& spec) {
  std::array<int32_t, 256> byte_tokens;
  byte_tokens.fill(-1);
  std::set<std::string_view> texts;
  for (size_t i = 0; i < model.tokens.size(); ++i) {
    const ModelToken& token = model.tokens[i];
    const auto id = int32_t(i);
    std::string bytes = is_text(token) ? replace_all(token.text, kSpace, " ") : "";
    if (is_text(token) && !texts.insert(token.text).second) {
      throw ConfigError(fmt::format("piece {}: {} is in it twice", i, printable(token.text)));
    }
    if (token.type == TokenType::unknown) {
      bytes = model.unknown_surface;
    } else if (token.type == TokenType::byte) {
      const std::optional<uint8_t> byte = byte_of_token(token.text);
      if (!byte)
        throw ConfigError(fmt::format("piece {}: {} is no byte", i, printable(token.text)));
      bytes = std::string(1, char(*byte));
      if (model.byte_fallback) byte_tokens[*byte] = id;
    }
    add_token_text(spec, id, std::move(bytes), token.type == TokenType::control);
    spec.texts[i].keeps_space = !is_text(token) || !token.text.starts_with(kSpace);
  }
  return byte_tokens;
}

}  // namespace

TokenizerSpec parse_sentencepiece(std::string_view text) {
  Model model = read_model(text);
  TokenizerSpec spec;
  spec.name = "sentencepiece";
  const std::array<int32_t, 256> bytes = add_texts(model, spec);
  std::vector<AddedToken> symbols;
  for (size_t i = 0; i < model.tokens.size(); ++i) {
    if (model.tokens[i].type != TokenType::user_defined) continue;
    symbols.push_back({model.tokens[i].text, int32_t(i), false, false, false, true});
  }
  if (model.type == kUnigram) {
    spec.unigram = make_unigram(model);
    spec.unigram->bytes = bytes;
  } else {
    spec.bpe = make_bpe(model);
    spec.bpe.bytes = bytes;
    spec.added = symbols;
    spec.normalizes_added = false;  // pieces are written as they are looked for
  }
  spec.strip = model.remove_spaces ? TokenizerSpec::Strip::each
               : model.add_prefix  ? TokenizerSpec::Strip::one
                                   : TokenizerSpec::Strip::none;
  const NormalizerSpec rules{.characters = std::move(model.characters),
                             .symbols = AddedTokens(std::move(symbols)),
                             .adds_space = model.add_prefix,
                             .at_end = model.suffix_space,
                             .removes_spaces = model.remove_spaces,
                             .escapes = model.escapes};
  spec.normalizations.push_back({.kind = Normalization::Kind::sentencepiece,
                                 .rules = std::make_shared<const NormalizerSpec>(rules)});
  const auto is_token = [&](int32_t id) { return id >= 0 && size_t(id) < model.tokens.size(); };
  if (is_token(model.bos)) {
    spec.before = {model.bos};
    spec.separator = model.bos;
  }
  spec.has_bos_switch = true;
  for (size_t i = 0; i < model.tokens.size(); ++i) {
    const ModelToken& token = model.tokens[i];
    if (!is_text(token)) spec.ids.emplace(token.text, int32_t(i));
    if (token.type == TokenType::unknown) spec.special_tokens["unk_token"] = token.text;
  }
  for (const auto& [role, id] : {std::pair("bos_token", model.bos), {"eos_token", model.eos}}) {
    if (is_token(id)) spec.special_tokens[role] = model.tokens[size_t(id)].text;
  }
  return spec;
}

}  // namespace tandem
