// Table `data`: files, tokenizer, held-out data, order of the samples.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tandem {

template <class S>
struct Key;  // engine/config/section.h

struct DataConfig {
  std::vector<std::string> paths;
  std::string format = "auto";
  std::string text_key = "text";  ///< of JSON Lines
  std::string tokenizer;          ///< path; empty: bytes
  double val_fraction = 0;
  std::vector<std::string> val_paths;
  std::string manifest;
  std::string document_separator;  ///< text, or a token's number; empty: none
  bool document_mask = false;
  std::string packing = "none";
  std::string order = "shuffle";
  int64_t shuffle_windows = 1024;  ///< of a stream

  static std::span<const Key<DataConfig>> keys();
  void check() const;  ///< throws ConfigError if keys contradict each other
};

}  // namespace tandem
