// Token files written byte by byte, as Megatron-LM, nanoGPT and numpy write them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/random.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {

/// `bytes` least significant bytes, little-endian.
inline std::string little_endian(int64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += char(uint64_t(value) >> (8 * i) & 0xff);
  return text;
}

inline std::string tokens_as(const std::vector<int32_t>& tokens, int bytes) {
  std::string text;
  for (const int32_t token : tokens) text += little_endian(token, bytes);
  return text;
}

struct IndexFixture {
  int64_t version = 1;
  int type_code = 8;  ///< uint16
  int item = 2;
  std::vector<int64_t> lengths;    ///< tokens of the sequences
  std::vector<int64_t> documents;  ///< first sequence of each; the number of sequences is added
  std::string text() const {
    std::string index("MMIDIDX\0\0", 9);
    index += little_endian(version, 8) + little_endian(type_code, 1);
    index += little_endian(int64_t(lengths.size()), 8);
    index += little_endian(int64_t(documents.size()) + 1, 8);
    for (const int64_t length : lengths) index += little_endian(length, 4);
    int64_t offset = 0;
    for (const int64_t length : lengths) {
      index += little_endian(offset, 8);
      offset += length * item;
    }
    for (const int64_t document : documents) index += little_endian(document, 8);
    return index + little_endian(int64_t(lengths.size()), 8);
  }
};

/// Header of version 1.0 and tokens, as numpy.save writes them.
inline std::string npy_text(const std::string& descr, const std::vector<int32_t>& tokens,
                            int bytes) {
  std::string header = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (" +
                       std::to_string(tokens.size()) + ",), }";
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 10 - 1, ' ');
  header += '\n';
  return "\x93NUMPY" + std::string("\x01\0", 2) + little_endian(int64_t(header.size()), 2) +
         header + tokens_as(tokens, bytes);
}

/// `count` tokens below `vocab`.
inline std::vector<int32_t> random_tokens(size_t count, int32_t vocab, uint64_t stream = 0) {
  std::vector<int32_t> tokens(count);
  for (size_t i = 0; i < count; ++i)
    tokens[i] = int32_t(philox(11, stream, i)[0] % uint32_t(vocab));
  return tokens;
}

/// Writes `prefix`.bin of uint16 tokens and `prefix`.idx, a sequence per document.
inline void write_megatron(const std::string& prefix, const std::vector<int32_t>& tokens,
                           std::vector<int64_t> lengths) {
  IndexFixture index;
  index.lengths = std::move(lengths);
  for (size_t i = 0; i < index.lengths.size(); ++i) index.documents.push_back(int64_t(i));
  write_bytes(prefix + ".bin", tokens_as(tokens, 2));
  write_bytes(prefix + ".idx", index.text());
}

}  // namespace tandem
