// Byte-pair encoding: the symbols of a word are merged, the pair of lowest rank first, from left to
// right among equal ranks.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tandem {

struct BpeMerge {
  int32_t left, right, result;
  int32_t rank;
};

/// Vocabulary of a BPE model. Texts of tokens are bytes.
struct BpeModel {
  BpeModel() { bytes.fill(-1); }

  struct TextHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  using Vocabulary = std::unordered_map<std::string, int32_t, TextHash, std::equal_to<>>;

  Vocabulary tokens;
  std::vector<BpeMerge> merges;
  bool by_character = false;       ///< symbols begin as characters rather than bytes
  bool whole_words_first = false;  ///< a word that is a token is not divided
  bool fuses_unknown = false;      ///< several unknown characters in a row are one token
  int32_t unknown = -1;            ///< of a character that is no token, if bytes are not
  std::array<int32_t, 256> bytes;  ///< token of a byte: all, or with by_character all or none (-1)
};

/// Thread-safe.
class Bpe {
 public:
  /// Throws ConfigError for a model in which a text could have no tokens.
  explicit Bpe(BpeModel model);
  const BpeModel& model() const { return model_; }

  /// Words and their tokens, to be used by one thread at a time.
  class Cache;
  /// A cache that no other thread uses, until it is destroyed.
  struct Lease {
    std::unique_lock<std::mutex> lock;
    std::shared_ptr<Cache> cache;
  };
  Lease lease() const;

  /// Appends the tokens of `word`.
  void encode(std::string_view word, Cache& cache, std::vector<int32_t>& out) const;

 private:
  struct Pair {
    uint64_t key;
    int32_t rank, result;
  };
  const Pair* find(int32_t left, int32_t right) const;
  void split(std::string_view word, std::vector<int32_t>& symbols) const;
  void merge_few(std::vector<int32_t>& symbols) const;
  void merge_many(std::vector<int32_t>& symbols) const;

  BpeModel model_;
  std::vector<Pair> pairs_;  ///< hash table with open addressing
  uint64_t pair_mask_ = 0;
  mutable std::mutex mutex_;  // of cache_
  mutable std::shared_ptr<Cache> cache_;
};

}  // namespace tandem
