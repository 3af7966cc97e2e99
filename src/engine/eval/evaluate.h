// Bits per byte of text under a model: each file separately, the tokenizer's separator before its
// first token.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/data/scored_windows.h"
#include "engine/model/codec_policy.h"
#include "engine/model/transformer.h"
#include "engine/tokenizer/tokenizer.h"
#include "tandem/communicator.h"

namespace tandem {

struct EvaluateOptions {
  int64_t seq = 0;     ///< tokens of a window; 0: the model's max_seq
  int64_t stride = 0;  ///< tokens scored per window after a file's first, 0: half of seq; the rest
                       ///< is context, so only the first window of a file has short contexts
  int64_t batch = 8;   ///< windows per forward pass
  DType dtype = DType::f32;
  Communicator* experts = nullptr;  ///< as in TransformerOptions; all its ranks run the same passes
  CodecPolicy codec = {};
  OverlapOptions overlap = {};
  std::shared_ptr<const Tokenizer> tokenizer = nullptr;  ///< nullptr: bytes
  std::string format = "text";  ///< of files: "text", "jsonl" (each document separately), "tokens"
  std::string text_key = "text";  ///< of JSON Lines
};

struct FileScore {
  std::string path;
  int64_t bytes = 0;  ///< of text; 0 of token files
  double nats = 0;
  int64_t tokens = 0;  ///< scored; not of windows
  double bits_per_byte() const;
  /// Exponential of the mean nats of a token.
  double perplexity() const;
  double nats_per_token() const;
};

/// Number of files, bytes and a hash of the text. Ranks that are done wait for those still reading.
/// Throws IoError, on every rank. Collective over `world` unless it is nullptr.
std::string text_identity(std::span<const std::string> paths, Communicator* world = nullptr);

/// Scores text. Construction and `score` are collective over `tp`, with the same result on every
/// rank; load the weights into `model()` between the two. Throws InvalidArgument for options out of
/// range.
class Evaluator {
 public:
  Evaluator(Communicator& tp, const ModelConfig& config, const EvaluateOptions& options);
  Transformer& model() { return model_; }
  const EvaluateOptions& options() const { return options_; }  ///< defaults filled in
  /// Called after every batch, with the bytes that it scored.
  void on_batch(std::function<void(int64_t bytes)> report);
  FileScore score(const std::string& path);
  FileScore score(const std::string& name, std::span<const std::byte> bytes);
  /// Scores at most options.batch windows in one pass, which runs even for none. `path` stays
  /// empty; `bytes` is the number of scored positions, `tokens` 0.
  FileScore score(std::span<const ScoredWindow> windows);
  /// Scores all files, each separately, but batches windows of several files: much faster than one
  /// by one if files are short.
  FileScore total(std::span<const std::string> paths);

 private:
  void add_file(const std::string& path, FileScore& to);
  void add(std::span<const std::byte> bytes, FileScore& to);
  void add_stream(std::span<const int32_t> stream, FileScore& to);
  void add_window(std::span<const int32_t> stream, int64_t begin, int64_t first_scored);
  double flush();
  double pass();

  EvaluateOptions options_;
  Transformer model_;
  int64_t vocab_;
  std::vector<int32_t> tokens_, targets_;
  std::vector<int32_t> document_starts_;  // empty: no window had documents
  size_t filled_ = 0;                     // windows
  int64_t scored_ = 0;                    // tokens in them
  double bytes_per_token_ = 1;
  std::function<void(int64_t)> report_;
};

}  // namespace tandem
