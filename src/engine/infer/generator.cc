#include "engine/infer/generator.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "comm/exec.h"
#include "core/machine.h"
#include "engine/infer/decoder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Min tokens for a padded block; below it, one at a time is cheaper.
constexpr int64_t kMinBlockTokens = 4;

const GeneratorOptions& checked(const GeneratorOptions& options) {
  if (options.block < 1) {
    throw InvalidArgument(fmt::format("prefill block {}: expected at least 1", options.block));
  }
  return options;
}

/// Throws InvalidArgument if the cache does not fit into memory.
int64_t cache_capacity(const ModelConfig& config, const GeneratorOptions& options) {
  const int64_t capacity = options.capacity == 0 ? config.max_seq : options.capacity;
  if (capacity < 1 || capacity > config.max_seq) {
    throw InvalidArgument(
        fmt::format("capacity {}: expected 1 to max_seq = {}", capacity, config.max_seq));
  }
  const double bytes = 2.0 * double(capacity) * double(config.head_dim) *
                       double(config.layers * config.kv_heads + 1) * double(size_of(options.dtype));
  const auto machine = double(this_machine().memory_bytes);
  if (machine == 0 || bytes <= machine) return capacity;
  throw InvalidArgument(fmt::format(
      "keys and values of {} tokens need {:.3g} GB: expected at most this machine's {:.3g} GB",
      capacity, bytes / 1e9, machine / 1e9));
}

}  // namespace

class Generator::Impl {
 public:
  Impl(Communicator& tp, const ModelConfig& config, const GeneratorOptions& options)
      : tp_(tp),
        config_(config),
        layout_(config, tp.size(), tp.rank()),
        capacity_(cache_capacity(config, options)),
        exec_(make_exec(tp)),
        weights_(exec_, layout_, options.dtype),
        rope_(exec_, capacity_, config.head_dim, config.rope_theta, config.rope_scaling),
        cache_(exec_, config_, layout_, rope_, options.dtype,
               {.pages = pages_of(capacity_),
                .sequences = 1,
                .rows = checked(options).block,
                .max_tokens = capacity_}),
        context_{tp, config_, layout_, weights_, options.dtype, cache_, options.codec, exec_},
        block_(options.block),
        prefill_(make_prefill(context_, block_, options.overlap, options.prefill)),
        step_(context_, options.overlap),
        head_(context_),
        last_(context_.f32(1, config.hidden)) {}

  std::span<const float> feed(std::span<const int32_t> tokens) {
    check_tokens(tokens);
    while (!tokens.empty()) {
      const int64_t left = int64_t(tokens.size());
      if (left < kMinBlockTokens) {
        step_.run(tokens[0], position_, last_);
        tokens = tokens.subspan(1);
        ++position_;
      } else {
        const auto block = tokens.first(size_t(std::min(left, block_)));
        prefill_.run(block, position_, last_);
        tokens = tokens.subspan(block.size());
        position_ += int64_t(block.size());
      }
    }
    return head_.run(last_);
  }

  void generate(std::span<const int32_t> prompt, int64_t count, const SamplingOptions& sampling,
                const std::function<bool(int32_t)>& on_token) {
    check(sampling);
    if (prompt.empty()) throw InvalidArgument("prompt: expected at least one token");
    std::vector<int32_t> text(prompt.begin(), prompt.end());
    // Half of a full cache is retained, so that refills are rare.
    const int64_t half = std::max<int64_t>(1, capacity_ / 2);
    const auto last_tokens = [&](int64_t tokens) {
      return std::span<const int32_t>(text).last(size_t(std::min(tokens, int64_t(text.size()))));
    };
    stats_ = {};
    position_ = 0;
    std::span<const int32_t> next(text);
    if (int64_t(text.size()) > capacity_) {
      next = last_tokens(std::clamp(capacity_ - count, half, capacity_));
      stats_.dropped_prompt = int64_t(text.size() - next.size());
    }
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < count; ++i) {
      const std::span<const float> logits = feed(next);
      if (i == 0) {
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        stats_.prefill_s = took.count();
      }
      const int32_t token = sample(logits, sampling, uint64_t(i));
      if (!on_token(token)) return;
      text.push_back(token);
      next = last_tokens(1);
      if (position_ == capacity_ && i + 1 < count) {
        position_ = 0;
        next = last_tokens(half);
        ++stats_.context_refills;
      }
    }
  }

  const std::string& prefill() const { return prefill_.name; }

  Communicator& tp_;
  ModelConfig config_;
  ModelLayout layout_;
  int64_t capacity_;
  Exec exec_;
  Weights weights_;
  int64_t position_ = 0;
  Stats stats_;

 private:
  void check_tokens(std::span<const int32_t> tokens) const {
    if (tokens.empty()) throw InvalidArgument("tokens: expected at least one");
    if (position_ + int64_t(tokens.size()) > capacity_) {
      throw InvalidArgument(
          fmt::format("tokens: {} after {} in the cache: expected at most {} in all", tokens.size(),
                      position_, capacity_));
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] < 0 || tokens[i] >= config_.vocab) {
        throw InvalidArgument(fmt::format("tokens: {} at position {}: expected 0 to {} (vocab {})",
                                          tokens[i], i, config_.vocab - 1, config_.vocab));
      }
    }
  }

  RopeTable rope_;
  KvCache cache_;
  DecoderContext context_;
  int64_t block_;
  Prefill prefill_;
  DecodeStep step_;
  TokenHead head_;
  Activation last_;
};

Generator::Generator(Communicator& tp, const ModelConfig& config, const GeneratorOptions& options)
    : impl_(std::make_unique<Impl>(tp, config, options)) {}
Generator::~Generator() = default;

Tensor Generator::parameters() const {
  return impl_->weights_.values();
}
const std::vector<Parameter>& Generator::parameter_list() const {
  return impl_->layout_.parameters;
}
void Generator::parameters_changed() {
  impl_->weights_.refresh();
}
int64_t Generator::capacity() const {
  return impl_->capacity_;
}
int64_t Generator::position() const {
  return impl_->position_;
}
void Generator::reset() {
  impl_->position_ = 0;
}
std::span<const float> Generator::feed(std::span<const int32_t> tokens) {
  return impl_->feed(tokens);
}
void Generator::generate(std::span<const int32_t> prompt, int64_t count,
                         const SamplingOptions& sampling,
                         const std::function<bool(int32_t)>& on_token) {
  impl_->generate(prompt, count, sampling, on_token);
}
const std::string& Generator::prefill() const {
  return impl_->prefill();
}
const Generator::Stats& Generator::stats() const {
  return impl_->stats_;
}

}  // namespace tandem
