#include "engine/eval/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string_view>
#include <utility>

#include "core/system/files.h"
#include "engine/data/stream/shared_work.h"
#include "engine/data/text/json_lines.h"
#include "engine/data/tokens/token_files.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int32_t kPadding = -1;  // as Stage::forward takes it

EvaluateOptions resolved(const ModelConfig& config, EvaluateOptions options) {
  if (options.seq == 0) options.seq = config.max_seq;
  if (options.stride == 0) options.stride = std::max<int64_t>(1, options.seq / 2);
  if (options.seq < 1 || options.seq > config.max_seq) {
    throw InvalidArgument(
        fmt::format("--seq {}: expected 1 to max_seq = {}", options.seq, config.max_seq));
  }
  if (options.stride < 1 || options.stride > options.seq) {
    throw InvalidArgument(
        fmt::format("--stride {}: expected 1 to the window's {}", options.stride, options.seq));
  }
  return options;
}

TransformerOptions model_options(const EvaluateOptions& options) {
  TransformerOptions result;
  result.batch = options.batch;
  result.seq = options.seq;
  result.dtype = options.dtype;
  result.experts = options.experts;
  result.codec = options.codec;
  result.overlap = options.overlap;
  return result;
}

}  // namespace

double FileScore::bits_per_byte() const {
  return bytes == 0 ? 0 : nats / std::numbers::ln2 / double(bytes);
}

double FileScore::nats_per_token() const {
  return tokens == 0 ? 0 : nats / double(tokens);
}

double FileScore::perplexity() const {
  return std::exp(nats_per_token());
}

std::string text_identity(std::span<const std::string> paths, Communicator* world) {
  std::string hashes, error;
  size_t bytes = 0;
  SharedWork work(world, "hashing the text", 0);
  try {
    for (const std::string& path : paths) {
      const std::string text = read_file(path);
      bytes += text.size();
      hashes += content_hash(text);
      work.advance(int64_t(text.size()));
    }
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
  return fmt::format("{} files, {} bytes, hash {}", paths.size(), bytes, content_hash(hashes));
}

Evaluator::Evaluator(Communicator& tp, const ModelConfig& config, const EvaluateOptions& options)
    : options_(resolved(config, options)),
      model_(tp, config, model_options(options_)),
      vocab_(config.vocab),
      tokens_(size_t(options_.batch * options_.seq), kPadding),
      targets_(tokens_.size(), -1) {}

void Evaluator::on_batch(std::function<void(int64_t)> report) {
  report_ = std::move(report);
}

FileScore Evaluator::score(const std::string& path) {
  FileScore result{path};
  add_file(path, result);
  result.nats += flush();
  return result;
}

FileScore Evaluator::score(const std::string& name, std::span<const std::byte> bytes) {
  FileScore result{name};
  add(bytes, result);
  result.nats += flush();
  return result;
}

FileScore Evaluator::total(std::span<const std::string> paths) {
  FileScore result{"total"};
  for (const std::string& path : paths) add_file(path, result);
  result.nats += flush();
  return result;
}

void Evaluator::add_file(const std::string& path, FileScore& to) {
  if (options_.format == "tokens") {
    const TokenFile file(path, 0, vocab_, true);
    std::vector<int32_t> tokens(size_t(file.layout().tokens));
    file.read(0, tokens);
    return add_stream(tokens, to);
  }
  const std::string text = read_content(path);
  if (options_.format == "text") return add(std::as_bytes(std::span(text)), to);
  int64_t number = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    ++number;
    if (is_blank_line(line)) continue;
    std::string document;
    try {
      document = parse_json_document(line, options_.text_key);
    } catch (const InvalidArgument& failed) {
      throw IoError(fmt::format("{}:{}: {}", path, number, failed.what()));
    }
    add(std::as_bytes(std::span(document)), to);
  }
}

void Evaluator::add(std::span<const std::byte> bytes, FileScore& to) {
  to.bytes += int64_t(bytes.size());
  std::vector<int32_t> stream;  // position p predicts token p + 1
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  options_.tokenizer ? options_.tokenizer->append(text, stream)
                     : ByteTokenizer().append(text, stream);
  if (stream.size() > 1) bytes_per_token_ = double(bytes.size()) / double(stream.size() - 1);
  add_stream(stream, to);
}

/// Adds the tokens, and the nats of the batches that became full.
void Evaluator::add_stream(std::span<const int32_t> stream, FileScore& to) {
  const int64_t positions = std::max<int64_t>(0, int64_t(stream.size()) - 1);
  to.tokens += positions;
  int64_t scored = 0;
  for (int64_t begin = 0; scored < positions; begin += options_.stride) {
    add_window(stream, begin, scored);
    scored = begin + options_.seq;
    if (filled_ == size_t(options_.batch)) to.nats += flush();
  }
}

FileScore Evaluator::score(std::span<const ScoredWindow> windows) {
  for (const ScoredWindow& window : windows) {
    const long at = long(filled_++) * long(options_.seq);
    std::ranges::copy(window.tokens, tokens_.begin() + at);
    std::ranges::copy(window.targets, targets_.begin() + at);
    if (!window.document_starts.empty()) {
      document_starts_.resize(tokens_.size());
      const auto rest = std::ranges::copy(window.document_starts, document_starts_.begin() + at);
      std::fill(rest.out, document_starts_.begin() + at + long(options_.seq),
                window.document_starts.back());
    }
    scored_ += std::ranges::count_if(window.targets, [](int32_t target) { return target >= 0; });
  }
  const int64_t scored = scored_;
  return {"", scored, pass()};
}

void Evaluator::add_window(std::span<const int32_t> stream, int64_t begin, int64_t first_scored) {
  const size_t at = filled_++ * size_t(options_.seq);
  for (int64_t i = 0; i < options_.seq; ++i) {
    const int64_t p = begin + i;
    const bool inside = p + 1 < int64_t(stream.size());
    tokens_[at + size_t(i)] = inside ? stream[size_t(p)] : kPadding;
    const bool counts = inside && p >= first_scored;
    targets_[at + size_t(i)] = counts ? stream[size_t(p) + 1] : -1;
    scored_ += counts;
  }
}

double Evaluator::flush() {
  return filled_ == 0 ? 0 : pass();
}

double Evaluator::pass() {
  if (!document_starts_.empty()) model_.set_documents(document_starts_);
  const double nats = model_.forward(tokens_, targets_);
  std::fill(tokens_.begin(), tokens_.end(), kPadding);
  std::fill(targets_.begin(), targets_.end(), -1);
  std::ranges::fill(document_starts_, 0);
  if (report_) report_(int64_t(double(scored_) * bytes_per_token_ + .5));
  filled_ = 0;
  scored_ = 0;
  return nats;
}

}  // namespace tandem
