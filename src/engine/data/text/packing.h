// Packing of documents into sequences: every prediction of a document (documents.h) is made exactly
// once, and a document of up to `seq` predictions is not cut. Longer ones are cut into sequences of
// their own and a rest, which is packed like a short document.
//
// Best-fit decreasing (arXiv 2404.10830): the longest first, each into the sequence with the least
// room that it fits into. Depends on the documents' lengths only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/data/tokens/token_source.h"

namespace tandem {

/// Document, or part of one, in a sequence.
struct DocumentSlice {
  int64_t begin = 0;  ///< its first token in the source's stream
  int32_t count = 0;  ///< predictions, of the token after each of `count` tokens
  bool ends = false;  ///< the last prediction is of the source's start token
};

/// Keeps 16 bytes a slice and 8 a sequence.
class Packing {
 public:
  /// `source`: with documents; it must outlive this object.
  Packing(const TokenSource& source, int64_t seq);
  int64_t sequences() const { return int64_t(first_slice_.size()) - 1; }
  std::span<const DocumentSlice> slices(int64_t sequence) const;
  /// Predictions of all sequences.
  int64_t predictions() const { return predictions_; }
  /// Predictions of a sequence that loss is taken on.
  int64_t targets(int64_t sequence) const;
  /// Reads a sequence (Sampler::read). Padding, of tokens -1, is a document of its own.
  void read(int64_t sequence, std::span<int32_t> tokens, std::span<int32_t> targets,
            std::span<int32_t> document_starts) const;

 private:
  void fill_sequences(std::span<const DocumentSlice> slices);

  const TokenSource* source_;
  int64_t seq_, predictions_ = 0;
  std::vector<DocumentSlice> slices_;    ///< sequence after sequence
  std::vector<int64_t> first_slice_{0};  ///< of each sequence, then the total
};

/// The one packing of this source object that all ranks of a process use. Any thread may call.
std::shared_ptr<const Packing> share_packing(const TokenSource& source, int64_t seq);

}  // namespace tandem
