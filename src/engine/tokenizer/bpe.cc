#include "engine/tokenizer/bpe.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <queue>
#include <utility>

#include "engine/tokenizer/unicode/unicode.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr uint64_t kEmpty = ~uint64_t(0);
constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();
/// Max symbols of a word for which looking at all pairs is faster than a queue.
constexpr size_t kFew = 32;

uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
}

uint64_t mixed(uint64_t key) {
  key *= 0x9e3779b97f4a7c15;
  return key ^ key >> 29;
}

}  // namespace

/// Direct-mapped: a word replaces another with its hash.
class Bpe::Cache {
 public:
  static constexpr size_t kMaxWord = 23, kMaxTokens = 9;
  struct Entry {
    uint8_t bytes = 0, count = 0;
    char word[kMaxWord] = {};
    int32_t tokens[kMaxTokens] = {};
  };
  Entry& entry(std::string_view word) {
    return entries_[XXH3_64bits(word.data(), word.size()) & (kEntries - 1)];
  }

  std::vector<int32_t> symbols;

 private:
  static constexpr size_t kEntries = size_t(1) << 15;
  std::vector<Entry> entries_ = std::vector<Entry>(kEntries);
};

Bpe::Bpe(BpeModel model) : model_(std::move(model)), cache_(std::make_shared<Cache>()) {
  for (size_t byte = 0; byte < 256 && !model_.by_character; ++byte) {
    if (model_.bytes[byte] < 0) {
      throw ConfigError(fmt::format("vocabulary has no token for byte 0x{:02x}", byte));
    }
  }
  const bool has_bytes = std::ranges::all_of(model_.bytes, [](int32_t id) { return id >= 0; });
  if (model_.by_character && !has_bytes && model_.unknown < 0) {
    throw ConfigError("vocabulary has neither a token for every byte nor one for the unknown");
  }
  if (!has_bytes) std::ranges::fill(model_.bytes, -1);
  pairs_.assign(std::bit_ceil(2 * model_.merges.size() + 2), {kEmpty, 0, 0});
  pair_mask_ = pairs_.size() - 1;
  for (const BpeMerge& merge : model_.merges) {
    const uint64_t key = pair_of(merge.left, merge.right);
    uint64_t at = mixed(key) & pair_mask_;
    while (pairs_[at].key != kEmpty && pairs_[at].key != key) at = (at + 1) & pair_mask_;
    pairs_[at] = {key, merge.rank, merge.result};
  }
  model_.merges = {};
}

const Bpe::Pair* Bpe::find(int32_t left, int32_t right) const {
  const uint64_t key = pair_of(left, right);
  for (uint64_t at = mixed(key) & pair_mask_;; at = (at + 1) & pair_mask_) {
    if (pairs_[at].key == key) return &pairs_[at];
    if (pairs_[at].key == kEmpty) return nullptr;
  }
}

Bpe::Lease Bpe::lease() const {
  std::unique_lock lock(mutex_, std::try_to_lock);
  std::shared_ptr<Cache> cache = lock ? cache_ : std::make_shared<Cache>();
  return {std::move(lock), std::move(cache)};
}

void Bpe::encode(std::string_view word, Cache& cache, std::vector<int32_t>& out) const {
  if (word.empty()) return;
  Cache::Entry* entry = nullptr;
  if (word.size() <= Cache::kMaxWord) {
    entry = &cache.entry(word);
    if (entry->bytes == word.size() && std::memcmp(entry->word, word.data(), word.size()) == 0) {
      out.insert(out.end(), entry->tokens, entry->tokens + entry->count);
      return;
    }
  }
  std::vector<int32_t>& symbols = cache.symbols;
  symbols.clear();
  const auto whole = model_.whole_words_first ? model_.tokens.find(word) : model_.tokens.end();
  if (whole != model_.tokens.end()) {
    symbols.push_back(whole->second);
  } else {
    split(word, symbols);
    symbols.size() <= kFew ? merge_few(symbols) : merge_many(symbols);
  }
  out.insert(out.end(), symbols.begin(), symbols.end());
  if (entry && symbols.size() <= Cache::kMaxTokens) {
    entry->bytes = uint8_t(word.size());
    entry->count = uint8_t(symbols.size());
    std::memcpy(entry->word, word.data(), word.size());
    std::ranges::copy(symbols, entry->tokens);
  }
}

void Bpe::split(std::string_view word, std::vector<int32_t>& symbols) const {
  if (!model_.by_character) {
    for (const char c : word) symbols.push_back(model_.bytes[uint8_t(c)]);
    return;
  }
  bool after_unknown = false;
  for (size_t at = 0; at < word.size();) {
    const std::string_view character = word.substr(at, unicode::decode(word.substr(at)).bytes);
    at += character.size();
    const auto found = model_.tokens.find(character);
    const bool is_unknown = found == model_.tokens.end() && model_.bytes[0] < 0;
    if (found != model_.tokens.end()) {
      symbols.push_back(found->second);
    } else if (!is_unknown) {
      for (const char c : character) symbols.push_back(model_.bytes[uint8_t(c)]);
    } else if (!after_unknown || !model_.fuses_unknown) {
      symbols.push_back(model_.unknown);
    }
    after_unknown = is_unknown;
  }
}

void Bpe::merge_few(std::vector<int32_t>& symbols) const {
  const Pair* pairs[kFew];
  size_t count = symbols.size();
  for (size_t i = 0; i + 1 < count; ++i) pairs[i] = find(symbols[i], symbols[i + 1]);
  while (count > 1) {
    size_t best = count;
    int32_t rank = kNoRank;
    for (size_t i = 0; i + 1 < count; ++i) {
      if (pairs[i] && pairs[i]->rank < rank) rank = pairs[i]->rank, best = i;
    }
    if (best == count) break;
    symbols[best] = pairs[best]->result;
    for (size_t i = best + 1; i + 1 < count; ++i) symbols[i] = symbols[i + 1];
    for (size_t i = best + 1; i + 2 < count; ++i) pairs[i] = pairs[i + 1];
    --count;
    if (best > 0) pairs[best - 1] = find(symbols[best - 1], symbols[best]);
    if (best + 1 < count) pairs[best] = find(symbols[best], symbols[best + 1]);
  }
  symbols.resize(count);
}

void Bpe::merge_many(std::vector<int32_t>& symbols) const {
  struct Link {
    int64_t before, after;
  };
  struct Candidate {
    int32_t rank;
    int64_t at;
    int32_t left, right, result;
    bool operator<(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  const auto end = int64_t(symbols.size());
  std::vector<Link> links(symbols.size());
  std::priority_queue<Candidate> queue;
  const auto offer = [&](int64_t left, int64_t right) {
    const int32_t a = symbols[size_t(left)], b = symbols[size_t(right)];
    if (const Pair* pair = find(a, b)) queue.push({pair->rank, left, a, b, pair->result});
  };
  for (int64_t i = 0; i < end; ++i) {
    links[size_t(i)] = {i - 1, i + 1};
    if (i > 0) offer(i - 1, i);
  }
  constexpr int32_t kMerged = -2;
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Link& link = links[size_t(best.at)];
    if (symbols[size_t(best.at)] != best.left || link.after == end ||
        symbols[size_t(link.after)] != best.right) {
      continue;  // one of the two was merged
    }
    symbols[size_t(best.at)] = best.result;
    symbols[size_t(link.after)] = kMerged;
    link.after = links[size_t(link.after)].after;
    if (link.after != end) {
      links[size_t(link.after)].before = best.at;
      offer(best.at, link.after);
    }
    if (link.before >= 0) offer(link.before, best.at);
  }
  std::erase(symbols, kMerged);
}

}  // namespace tandem
