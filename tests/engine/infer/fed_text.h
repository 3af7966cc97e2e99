// Logits after the tokens of one text, which a decoder reads in blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/host_copy.h"
#include "engine/infer/decoder.h"
#include "engine/infer/rank_model.h"
#include "engine/infer/request.h"

namespace tandem::test {

struct FedTextOptions {
  DType dtype = DType::f32;
  int64_t block = 32;  ///< max tokens of a step
  CodecPolicy codec = {};
  Strategy prefill = Strategy::serial;
  std::optional<WeightFormat> weights = {};
};

class FedText {
 public:
  FedText(Communicator& tp, const ModelConfig& config, const FedTextOptions& options = {})
      : block_(options.block),
        model_(tp, config, options.dtype,
               {pages_of(config.max_seq), 1, options.block, config.max_seq}, options.codec,
               options.weights),
        decoder_(model_.context, options.block, 1,
                 {.overlap = {Strategy::serial, 0}, .prefill = options.prefill}) {}

  void set_weights(const SetParameter& set) { model_.set_weights(set); }
  int64_t position() const { return position_; }
  /// Discards all tokens.
  void reset() { position_ = 0; }
  /// Appends tokens, at least one; logits after the last.
  std::vector<float> feed(std::span<const int32_t> tokens) {
    while (true) {
      const auto count = std::min(int64_t(tokens.size()), block_);
      StepRows rows;
      rows.tokens.assign(tokens.begin(), tokens.begin() + count);
      rows.sequences.assign(size_t(count), 0);
      for (int64_t i = 0; i < count; ++i) rows.positions.push_back(int32_t(position_ + i));
      for (int64_t page = 0; page < pages_of(model_.config.max_seq); ++page) {
        rows.pages.push_back(int32_t(page));
      }
      if (count > 1) rows.chunks = {{0, count}};
      rows.chosen = {int32_t(count - 1)};
      rows.options.resize(1);
      rows.read = {0};
      decoder_.run(rows);
      position_ += count;
      tokens = tokens.subspan(size_t(count));
      if (tokens.empty()) return decoder_.read_logits(0);
    }
  }

  /// The first `count` tokens after the prompt of a request without rules.
  std::vector<int32_t> write(const Request& request, size_t count) {
    reset();
    std::vector<float> logits = feed(request.prompt);
    std::vector<int32_t> tokens;
    while (true) {
      tokens.push_back(sample(host_tensor(logits), request.sampling, tokens.size()));
      if (tokens.size() == count) return tokens;
      logits = feed({&tokens.back(), 1});
    }
  }

 private:
  int64_t block_, position_ = 0;
  RankModel model_;
  Decoder decoder_;
};

}  // namespace tandem::test
