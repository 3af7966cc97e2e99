// Parts of tokenizers against slow references: patterns, merges, normalization, added tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "engine/tokenizer/added_tokens.h"
#include "engine/tokenizer/bpe.h"
#include "engine/tokenizer/pattern.h"
#include "engine/tokenizer/unicode/character_map.h"
#include "engine/tokenizer/unicode/unicode.h"
#include "engine/tokenizer/unigram.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using testing::HasSubstr;

/// Matches of the pattern, between '|', and text between them in parentheses.
std::string split(const std::string& regex, std::string_view text) {
  const Pattern pattern(regex);
  std::string result, gap;
  for (size_t at = 0; at < text.size();) {
    const size_t length = pattern.match(text, at);
    if (length == 0) {
      gap += text[at++];
      continue;
    }
    if (!gap.empty()) result += "(" + gap + ")|";
    gap.clear();
    result += std::string(text.substr(at, length)) + "|";
    at += length;
  }
  return gap.empty() ? result : result + "(" + gap + ")|";
}

TEST(Pattern, FindsTheFirstAlternativeThatMatches) {
  EXPECT_EQ(split("a|ab|b", "ab"), "a|b|");
  EXPECT_EQ(split("ab|a|b", "ab"), "ab|");
  EXPECT_EQ(split("(?:a|ab)c", "abc ac"), "abc|( )|ac|");
  EXPECT_EQ(split("\\s+(?!\\S)|\\s+|\\S", "a   b"), "a|  | |b|");
  EXPECT_EQ(split("\\p{N}{1,3}", "1234567"), "123|456|7|");
  EXPECT_EQ(split("x{2,}y", "xyxxxy"), "(xy)|xxxy|");
  EXPECT_EQ(split("a++a|a", "aa"), "a|a|");
  EXPECT_EQ(split("a+a|a", "aa"), "aa|");
  EXPECT_EQ(split("(?:ab){1,2}(?=c)", "ababc"), "abab|(c)|");
  EXPECT_EQ(split("[^a-c\\]]+", "abc]d-f"), "(abc])|d-f|");
  EXPECT_EQ(split("(?i:'re|k)", "'RE'rEkK\u212a"), "'RE|'rE|k|K|\u212a|");
  EXPECT_EQ(split("\\p{Lu}[\\p{Ll}\\p{Lm}]*", "ÄäHallo"), "Ää|Hallo|");
  EXPECT_EQ(split("\\x41|\\u00e9|\\x{1F600}", "Aé😀"), "A|é|😀|");
  EXPECT_EQ(split("[一-龥]+", "a中文b"), "(a)|中文|(b)|");
  EXPECT_EQ(split(".", "a\nb"), "a|(\n)|b|");
}

TEST(Pattern, BytesThatAreNotUtf8AreNoLetters) {
  EXPECT_EQ(split("\\p{L}+",
                  "a\xff"
                  "b\xe2\x82"),
            "a|(\xff)|b|(\xe2\x82)|");
  EXPECT_EQ(split("[^\\p{L}]+a",
                  "\xe2\x82\xff"
                  "a"),
            "\xe2\x82\xff"
            "a|");
}

TEST(Pattern, NamesWhatIsNotSupported) {
  const std::pair<const char*, const char*> cases[] = {{"a|*", "* at byte 2"},
                                                       {"(a", "a group without ) at byte 2"},
                                                       {"a)", "an unmatched )"},
                                                       {"[a", "such a class"},
                                                       {"[[:alpha:]]", "such a class"},
                                                       {"\\w+", "the escape \\w"},
                                                       {"\\bx", "the escape \\b"},
                                                       {"^a", "^ at byte 0"},
                                                       {"a$", "$ at byte 1"},
                                                       {"\\p{Han}", "\\p{Han}"},
                                                       {"(?<n>a)", "the group (?<n"},
                                                       {"(?:a)+", "a group repeated without limit"},
                                                       {"a{1,2}+", "a second count"},
                                                       {"a+?", "a second count"},
                                                       {"a{5000}", "so large a count"},
                                                       {"a{2,1}", "the count"},
                                                       {"(?i:ä)", "(?i) with such characters"},
                                                       {"a?", "matches the empty text"},
                                                       {"", "matches the empty text"},
                                                       {"a|(?=b)", "matches the empty text"},
                                                       {"\\x{110000}", "the hexadecimal escape"},
                                                       {"[b-a]", "the range"}};
  for (const auto& [regex, message] : cases) {
    try {
      Pattern pattern{std::string_view(regex)};
      ADD_FAILURE() << regex << " is accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(message)) << regex;
    }
  }
}

TEST(Pattern, SearchThatTakesTooLongEnds) {
  const Pattern pattern("\\s*\\s*\\s*\\s*x");
  EXPECT_THROW(pattern.match(std::string(5000, ' '), 0), InvalidArgument);
  EXPECT_EQ(Pattern("\\s*x|\\s+(?!\\S)|\\s+").match(std::string(1 << 20, ' '), 0), size_t(1) << 20);
}

TEST(Pattern, LiteralMatchesOnlyItself) {
  for (const std::string text : {"a.b", "(x)*", "\\d", "[a-z]", "€^$"}) {
    EXPECT_EQ(Pattern::literal(text).match(text, 0), text.size());
  }
  EXPECT_EQ(Pattern::literal("a.b").match("axb", 0), 0u);
}

/// Merges the leftmost pair of lowest rank until there is none.
std::vector<int32_t> merge_slowly(const std::vector<BpeMerge>& merges,
                                  std::vector<int32_t> symbols) {
  std::map<std::pair<int32_t, int32_t>, std::pair<int32_t, int32_t>> by_pair;
  for (const BpeMerge& merge : merges)
    by_pair[{merge.left, merge.right}] = {merge.rank, merge.result};
  while (true) {
    std::pair<int32_t, size_t> best{INT32_MAX, 0};
    int32_t result = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = by_pair.find({symbols[i], symbols[i + 1]});
      if (found == by_pair.end() || found->second.first >= best.first) continue;
      best = {found->second.first, i};
      result = found->second.second;
    }
    if (best.first == INT32_MAX) return symbols;
    symbols[best.second] = result;
    symbols.erase(symbols.begin() + long(best.second) + 1);
  }
}

TEST(Bpe, MergesEqualTheReference) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 40; ++trial) {
    BpeModel model;
    std::vector<std::string> texts;
    for (int byte = 0; byte < 256; ++byte) {
      model.bytes[size_t(byte)] = byte;
      texts.push_back(std::string(1, char(byte)));
    }
    const uint32_t letters = 1 + random() % 4;
    std::vector<size_t> pool;
    for (uint32_t i = 0; i < letters; ++i) pool.push_back('a' + i);
    for (int i = 0; i < 60; ++i) {
      const size_t left = pool[random() % pool.size()], right = pool[random() % pool.size()];
      const std::string whole = texts[left] + texts[right];
      const auto known = std::ranges::find(texts, whole);
      const auto id = size_t(known - texts.begin());
      if (known == texts.end()) texts.push_back(whole), pool.push_back(id);
      const int32_t rank = trial % 2 ? i : int32_t(random() % 20);  // SentencePiece has equal ranks
      model.merges.push_back({int32_t(left), int32_t(right), int32_t(id), rank});
    }
    // The last of equal pairs counts.
    const std::vector<BpeMerge> merges = model.merges;
    const Bpe bpe(std::move(model));
    for (int i = 0; i < 60; ++i) {
      std::string word;
      for (uint32_t n = 1 + random() % (i < 50 ? 40 : 400); n > 0; --n)
        word += char('a' + random() % letters);
      std::vector<int32_t> symbols(word.begin(), word.end()), got;
      bpe.encode(word, *bpe.lease().cache, got);
      ASSERT_EQ(got, merge_slowly(merges, symbols)) << word;
    }
  }
}

TEST(Bpe, LongRunTakesLinearTime) {
  BpeModel model;
  for (int32_t byte = 0; byte < 256; ++byte) model.bytes[size_t(byte)] = byte;
  for (int32_t i = 0, left = 'a'; i < 20; ++i) {
    model.merges.push_back({left, left, 256 + i, i});
    left = 256 + i;
  }
  const Bpe bpe(std::move(model));
  std::vector<int32_t> tokens;
  bpe.encode(std::string(1 << 20, 'a'), *bpe.lease().cache, tokens);  // quadratic: hours
  EXPECT_EQ(tokens, std::vector<int32_t>{275});
}

TEST(Bpe, ModelThatLacksBytesIsRefused) {
  BpeModel model;
  EXPECT_THROW(Bpe(std::move(model)), ConfigError);
  BpeModel characters;
  characters.by_character = true;
  EXPECT_THROW(Bpe(std::move(characters)), ConfigError);
}

TEST(Normalization, ComposesAndReorders) {
  const std::pair<const char*, const char*> cases[] = {
      {"e\u0301", "é"},
      {"a\u0307\u0323", "\u1ea1\u0307"},
      {"\u1112\u1161\u11ab", "한"},
      {"\u212b", "Å"},
      {"\u0344", "\u0308\u0301"},  // is not composed again
      {"\u0958", "\u0915\u093c"},  // a composition exclusion
      {"a\u0301\u0334b", "\u00e1\u0334b"},
      {"\u1e9b\u0323", "\u1e9b\u0323"},
      {"\U0001d15e", "\U0001d157\U0001d165"},
      {"\uf900", "豈"},
      {"e\u0334\u0301", "\u00e9\u0334"},
      {"a\u0305\u0301", "a\u0305\u0301"},  // the first mark blocks the second
      {"\u09c7\u09be", "\u09cb"},
      {"\u09c7\u0301\u09be", "\u09c7\u0301\u09be"}};
  for (const auto& [text, composed] : cases) EXPECT_EQ(unicode::to_nfc(text), composed);
  const std::string damaged = "e\u0301\xff\xe2\x82";
  EXPECT_EQ(unicode::to_nfc(damaged), "é\xff\xe2\x82");
}

TEST(Normalization, IsIdempotentOnRandomText) {
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (int n = 0; n < 12; ++n) {
      const uint32_t bases[] = {'a', 0x300, 0x1100, 0x1160, 0x11a8, 0xac00, 0x900, 0x1e00, 0xf900};
      unicode::append(bases[random() % 9] + random() % 80, text);
    }
    const std::string once = unicode::to_nfc(text);
    ASSERT_EQ(unicode::to_nfc(once), once);
  }
}

/// Largest sum of scores over all divisions of `text`.
double best_score(const UnigramModel& model, std::string_view text) {
  if (text.empty()) return 0;
  double best = text.size() == 1 ? model.unknown_score : -1e9;
  bool has_first = false;
  for (const UnigramModel::Token& token : model.tokens) {
    if (!text.starts_with(token.text)) continue;
    has_first = has_first || token.text.size() == 1;
    best = std::max(best, token.score + best_score(model, text.substr(token.text.size())));
  }
  if (!has_first) best = std::max(best, model.unknown_score + best_score(model, text.substr(1)));
  return best;
}

TEST(Unigram, TokensHaveTheLargestSumOfScores) {
  std::mt19937 random(5);
  for (int i = 0; i < 300; ++i) {
    UnigramModel model;
    model.unknown = 0;
    model.unknown_score = -30;
    std::map<std::string, double> scores;
    for (int i_token = 0; i_token < 8; ++i_token) {
      std::string text;
      for (uint32_t n = 1 + random() % 4; n > 0; --n) text += char('a' + random() % 3);
      if (scores.emplace(text, -double(random() % 1000) / 64).second) {
        model.tokens.push_back({text, int32_t(scores.size()), scores[text]});
      }
    }
    const Unigram unigram(model);
    for (int line = 0; line < 10; ++line) {
      std::string text;
      for (uint32_t n = 1 + random() % 9; n > 0; --n) text += char('a' + random() % 3);
      std::vector<int32_t> tokens;
      unigram.encode(text, tokens);
      // Unknown characters in a row are one token: their number is what the pieces leave.
      double sum = 0;
      size_t left = text.size();
      for (const int32_t token : tokens) {
        if (token == 0) continue;
        sum += model.tokens[size_t(token) - 1].score;
        left -= model.tokens[size_t(token) - 1].text.size();
      }
      EXPECT_DOUBLE_EQ(sum + double(left) * model.unknown_score, best_score(model, text)) << text;
    }
  }
}

TEST(Unigram, ModelWithoutTokensForAllTextsIsRefused) {
  UnigramModel model;
  model.tokens = {{"a", 0, -1}};
  EXPECT_THROW(Unigram{model}, ConfigError);
  model.unknown = 1;
  EXPECT_NO_THROW(Unigram{model});
  model.tokens[0].score = -HUGE_VAL;
  EXPECT_THROW(Unigram{model}, ConfigError);
  model.tokens = {{std::string(size_t(33) << 20, 'a'), 0, -1}};
  EXPECT_THROW(Unigram{model}, ConfigError);
}

TEST(CharacterMap, RandomBytesEndWithinTheText) {
  std::mt19937 random(3);
  for (int i = 0; i < 2000; ++i) {
    std::string map{char(64), 1, 0, 0};  // a trie of 320 bytes
    for (int byte = 0; byte < 320; ++byte) map += char(random() % 3 ? random() : 0);
    map += std::string("ab\0c\0", 5);
    const CharacterMap characters(map);
    std::string text;
    for (int byte = 0; byte < 20; ++byte) text += char(random() % 64);
    const CharacterMap::Match match = characters.longest(text);
    EXPECT_LE(match.bytes, text.size());
    EXPECT_LE(match.replacement.size(), 2u);
    EXPECT_LE(characters.replace_clusters(text).size(), 2 * text.size());
  }
}

TEST(CharacterMap, ClustersAreThoseOfUnicode) {
  const std::pair<std::string, size_t> cases[] = {{"ab", 1},
                                                  {"\r\n", 2},
                                                  {"\n\u0301", 1},
                                                  {"e\u0301\u0327x", 5},
                                                  {"\u0600a", 3},
                                                  {"\u1100\u1161\u11a8", 9},
                                                  {"\uac00\u11a8\u1161", 6},
                                                  {"\u0e01\u0e33", 6},
                                                  {"\u1000\u102b", 3},
                                                  {"\U0001f1e6\U0001f1e7\U0001f1e8", 8},
                                                  {"\U0001f44b\U0001f3fd!", 8}};
  for (const auto& [text, bytes] : cases) EXPECT_EQ(cluster_bytes(text), bytes) << text;
}

TEST(Unicode, DecodesWhatItAppends) {
  for (uint32_t code = 0; code < 0x110000; ++code) {
    if (code >= 0xd800 && code < 0xe000) continue;
    std::string text;
    unicode::append(code, text);
    const unicode::CodePoint found = unicode::decode(text);
    ASSERT_TRUE(found.value == code && found.bytes == text.size()) << code;
  }
}

TEST(AddedTokens, LongestAtTheFirstPositionIsFound) {
  const AddedTokens tokens({{"ab", 1}, {"abcd", 2}, {"bc", 3}});
  const auto match = tokens.find("xabcxabcd", 0);
  EXPECT_EQ(std::tuple(match.begin, match.end, match.id), std::tuple(1u, 3u, 1));
  EXPECT_EQ(tokens.find("xabcxabcd", 3).id, 2);
  EXPECT_EQ(tokens.find("xabcxabcd", 6).id, 3);
  EXPECT_EQ(tokens.find("none", 0).id, -1);
}

TEST(AddedTokens, SingleWordsAreFoundOnlyBetweenOtherCharacters) {
  AddedToken word{"ab", 1};
  word.is_single_word = true;
  const AddedTokens tokens({word, {"b", 2}});
  EXPECT_EQ(tokens.find("ab", 0).id, 1);
  EXPECT_EQ(tokens.find("-ab!", 0).id, 1);
  for (const char* text : {"xab", "abx", "ab1", "ab_", "\u00e9ab", "ab\u0301", "ab\u200d"}) {
    EXPECT_EQ(tokens.find(text, 0).id, -1) << text;  // nor the b in it
  }
  const std::string_view later = "abx ab";
  EXPECT_EQ(tokens.find(later, 0).begin, 4);
  EXPECT_EQ(tokens.find("xb", 0).id, 2);
}

TEST(AddedTokens, SpaceBeforeIsNotTakenTwice) {
  const AddedTokens tokens({{"<a>", 1, false, true, true}});
  const std::string text = "x <a>  <a> y";
  const auto first = tokens.find(text, 0);
  EXPECT_EQ(std::tuple(first.begin, first.end), std::tuple(1u, 7u));
  const auto second = tokens.find(text, first.end);
  EXPECT_EQ(std::tuple(second.begin, second.end), std::tuple(7u, 11u));
}

}  // namespace
}  // namespace tandem
