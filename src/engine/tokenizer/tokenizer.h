// Tokenizers of documents that are stored as text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/config.h"

namespace tandem {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// Identifies the tokens that a text becomes; part of a run's fingerprint.
  virtual std::string name() const = 0;
  /// Tokens are below it.
  virtual int64_t vocab() const = 0;
  /// Appends a document's tokens and those that separate it from others.
  virtual void append(std::string_view document, std::vector<int32_t>& tokens) const = 0;
  /// Appends a document's tokens without those that separate it.
  virtual void append_text(std::string_view document, std::vector<int32_t>& tokens) const = 0;
  /// Appends the tokens of text that continues a document.
  virtual void append_more(std::string_view text, std::vector<int32_t>& tokens) const = 0;
};

/// kBos, then the bytes: as in files of text.
class ByteTokenizer : public Tokenizer {
 public:
  std::string name() const override { return "bytes"; }
  int64_t vocab() const override { return kBos + 1; }
  void append(std::string_view document, std::vector<int32_t>& tokens) const override {
    tokens.push_back(kBos);
    append_more(document, tokens);
  }
  void append_text(std::string_view document, std::vector<int32_t>& tokens) const override {
    append_more(document, tokens);
  }
  void append_more(std::string_view text, std::vector<int32_t>& tokens) const override {
    for (const char c : text) tokens.push_back(uint8_t(c));
  }
};

}  // namespace tandem
