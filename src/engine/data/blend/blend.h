// Weighted blend of several sources.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "engine/data/tokens/token_source.h"

namespace tandem {

/// Its stream is that of its sources, one after the other; a sampler takes samples of each source
/// in the order of BlendOrder. It holds out what its sources do.
class Blend : public TokenSource {
 public:
  using Sources = std::vector<std::shared_ptr<const TokenSource>>;
  /// `weights`: one per source, above 0; only their ratios count.
  Blend(Sources sources, std::vector<double> weights);
  int64_t tokens() const override { return starts_.back(); }
  void read(int64_t begin, std::span<int32_t> out) const override;
  void verify(Communicator* world = nullptr) const override;
  std::string format() const override { return sources_[0]->format(); }
  std::string describe() const override;
  std::string identity() const override;
  std::vector<WeightedSource> components() const override;
  /// Empty unless all sources have some.
  std::span<const int64_t> document_begins() const override;
  std::span<const int64_t> unpredicted_begins() const override;
  std::span<const int64_t> scored_spans() const override;
  /// Start token that all sources share, or -1.
  int32_t start_token() const override;

 private:
  void join_held_out();

  Sources sources_;
  std::vector<double> weights_;
  std::vector<int64_t> starts_{0};  ///< position of each source in the stream, then the total
  mutable std::once_flag once_;
  mutable std::vector<int64_t> document_begins_, unpredicted_begins_;
  std::vector<int64_t> scored_;
};

}  // namespace tandem
