#include "engine/infer/generator.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "engine/infer/rank_model.h"
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

KvCache::Size cache_size(const Communicator& tp, const ModelConfig& config,
                         const GeneratorOptions& options) {
  if (options.int8_weights) check_int8_weights(config, tp.size());
  const int64_t capacity = options.capacity == 0 ? config.max_seq : options.capacity;
  return {.pages = pages_of(capacity),
          .sequences = 1,
          .rows = checked(options).block,
          .max_tokens = capacity,
          .singles = 1};
}

}  // namespace

class Generator::Impl {
 public:
  Impl(Communicator& tp, const ModelConfig& config, const GeneratorOptions& options)
      : model_(tp, config, options.dtype, cache_size(tp, config, options), options.codec,
               options.int8_weights),
        block_(options.block),
        prefill_(make_prefill(model_.context, block_, options.overlap, options.prefill)),
        step_(model_.context, options.overlap),
        head_(model_.context),
        last_(model_.context.f32(1, config.hidden)) {}

  Tensor feed(std::span<const int32_t> tokens) {
    check_room(tokens);
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
                const std::function<bool(int32_t)>& on_token, const LogitsProcessors& rules) {
    check(sampling);
    check(rules, model_.config.vocab);
    if (prompt.empty()) throw InvalidArgument("prompt: expected at least one token");
    std::vector<int32_t> text(prompt.begin(), prompt.end());
    // Half of a full cache is retained, so that refills are rare.
    const int64_t half = std::max<int64_t>(1, capacity() / 2);
    const auto last_tokens = [&](int64_t tokens) {
      return std::span<const int32_t>(text).last(size_t(std::min(tokens, int64_t(text.size()))));
    };
    stats_ = {};
    position_ = 0;
    std::span<const int32_t> next(text);
    if (int64_t(text.size()) > capacity()) {
      next = last_tokens(std::clamp(capacity() - count, half, capacity()));
      stats_.dropped_prompt = int64_t(text.size() - next.size());
    }
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < count; ++i) {
      const Tensor logits = feed(next);
      if (i == 0) {
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        stats_.prefill_s = took.count();
      }
      const int32_t token = choose(logits, sampling, i, rules, {text, prompt.size()});
      if (!on_token(token)) return;
      text.push_back(token);
      next = last_tokens(1);
      if (position_ == capacity() && i + 1 < count) {
        position_ = 0;
        next = last_tokens(half);
        ++stats_.context_refills;
      }
    }
  }

  const std::string& prefill() const { return prefill_.name; }

  int64_t capacity() const { return model_.cache.max_tokens(); }

  RankModel model_;
  int64_t position_ = 0;
  Stats stats_;

 private:
  struct Context {
    std::span<const int32_t> tokens;
    size_t prompt;  ///< of them
  };
  /// Token `index` of a text.
  static int32_t choose(const Tensor& logits, const SamplingOptions& sampling, int64_t index,
                        const LogitsProcessors& rules, const Context& context) {
    if (rules.change_nothing()) return sample(logits, sampling, uint64_t(index));
    const Memory memory(logits.bytes());
    const Tensor changed = memory.view(DType::f32, {logits.elements()});
    copy({}, logits, changed);
    apply(rules, context.tokens, context.prompt, sampling.temperature, changed);
    return sample(changed, sampling, uint64_t(index));
  }
  void check_room(std::span<const int32_t> tokens) const {
    check_tokens(model_.config, tokens);
    if (position_ + int64_t(tokens.size()) <= capacity()) return;
    throw InvalidArgument(
        fmt::format("tokens: {} after {} in the cache: expected at most {} in all", tokens.size(),
                    position_, capacity()));
  }

  int64_t block_;
  Prefill prefill_;
  DecodeStep step_;
  TokenHead head_;
  Activation last_;
};

Generator::Generator(Communicator& tp, const ModelConfig& config, const GeneratorOptions& options)
    : impl_(std::make_unique<Impl>(tp, config, options)) {}
Generator::~Generator() = default;

void Generator::set_weights(const SetParameter& set) {
  impl_->model_.set_weights(set);
}
int64_t Generator::capacity() const {
  return impl_->capacity();
}
int64_t Generator::position() const {
  return impl_->position_;
}
void Generator::reset() {
  impl_->position_ = 0;
}
Tensor Generator::feed(std::span<const int32_t> tokens) {
  return impl_->feed(tokens);
}
void Generator::generate(std::span<const int32_t> prompt, int64_t count,
                         const SamplingOptions& sampling,
                         const std::function<bool(int32_t)>& on_token,
                         const LogitsProcessors& rules) {
  impl_->generate(prompt, count, sampling, on_token, rules);
}
const std::string& Generator::prefill() const {
  return impl_->prefill();
}
const Generator::Stats& Generator::stats() const {
  return impl_->stats_;
}

}  // namespace tandem
