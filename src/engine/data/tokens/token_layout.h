// Headers of token files: Megatron-LM's .bin with its .idx, NumPy's .npy, llm.c's .bin, and a .bin
// of uint16, uint32 or int64 tokens without a header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tandem {

/// Integer type of a file's tokens, little-endian.
enum class TokenType : uint8_t { u8, i8, u16, i16, u32, i32, i64 };
/// "uint16"
std::string name_of(TokenType type);
int64_t bytes_of(TokenType type);

/// Token that lies outside of a vocabulary.
struct StrayToken {
  int64_t index = 0, value = 0;
};

/// Widens tokens to int32. Returns whether all are in [0, vocab); `stray`: the first that is not.
bool widen_tokens(TokenType type, std::span<const std::byte> bytes, int64_t vocab,
                  std::span<int32_t> out, StrayToken& stray);

struct TokenLayout {
  TokenType type = TokenType::u16;
  uint64_t offset = 0;  ///< of the first token in the file
  int64_t tokens = 0;
  int64_t documents = 0;        ///< 0: the file has no index
  int64_t training_tokens = 0;  ///< those before the held-out ones
};

/// Reads the header of a token file. Its last `val_fraction` is held out: documents if it has an
/// index of several, else tokens. Throws IoError naming the file and what of it is inconsistent.
/// `path`: ends in .npy, or in .bin with or without an .idx of the same name next to it.
TokenLayout read_token_layout(const std::string& path, double val_fraction);

/// Path of the index that belongs to the .bin file `path`.
std::string index_path(const std::string& path);
/// The .idx file `path` of a .bin file of `bin_bytes` bytes. Indices above 64 MiB are checked in
/// part.
TokenLayout read_megatron_index(const std::string& path, uint64_t bin_bytes, double val_fraction);
/// Token at which each document of an .idx file begins. Throws IoError for one that is damaged.
std::vector<int64_t> read_index_begins(const std::string& path);
/// The .npy file `path`.
TokenLayout read_npy_header(const std::string& path);

}  // namespace tandem
