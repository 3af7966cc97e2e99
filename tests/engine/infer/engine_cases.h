// Requests of a small model to an Engine, and their texts, on ranks of any device.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/exec.h"
#include "engine/infer/engine.h"
#include "engine/model/initialize.h"
#include "tandem/random.h"
#include "tests/engine/infer/set_weights.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem::test {

constexpr int64_t kCapacity = 200;

/// Ranks as threads, with one kernel thread each.
inline void on_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  WorldOptions world;
  world.ranks = ranks;
  run_threads(world, [&](Communicator& tp) {
    set_kernel_threads(1);
    body(tp);
  });
}

struct Choice {
  uint64_t seed, count = 0;
  int64_t below(int64_t bound) { return int64_t(philox(seed, 7, count++)[0] % uint64_t(bound)); }
};

/// A small model, with experts if the variant's name says so.
inline ModelConfig variant_model(const Variant& variant, int64_t max_seq) {
  ModelConfig config = small_model(variant);
  config.max_seq = max_seq;
  if (std::string_view(variant.name) == "experts") {
    config.experts = 6;
    config.top_k = 2;
    config.shared_ffn = 16;
    config.moe_layer_freq = 2;
  }
  return config;
}

inline ModelConfig engine_model(const Variant& variant) {
  ModelConfig config = variant_model(variant, kCapacity);
  config.vocab = 257;
  return config;
}

/// Weights far from a fresh model's, so that tokens depend on each other.
template <typename Model>
void fill_engine(Model& model, const ModelConfig& config, Communicator& tp) {
  const ModelLayout layout(config, tp.size(), tp.rank());
  std::vector<float> weights(size_t(layout.size));
  initialize_parameters({}, layout, config, 17, flat(weights));
  for (float& w : weights) w = w == 1 ? w : w * 6;
  set_weights(model, make_exec(tp), weights);
}

inline std::vector<Request> random_requests(int64_t count, uint64_t seed, int64_t max_prompt,
                                            int64_t max_text) {
  std::vector<Request> all;
  Choice choice{seed};
  for (int64_t i = 0; i < count; ++i) {
    Request request;
    for (int64_t j = 0, n = 1 + choice.below(max_prompt); j < n; ++j) {
      request.prompt.push_back(int32_t(choice.below(256)));
    }
    request.max_tokens = 1 + choice.below(max_text);
    request.sampling = {.temperature = choice.below(3) * 0.5,
                        .top_k = choice.below(2) * 9,
                        .top_p = choice.below(2) == 0 ? 1 : 0.9,
                        .seed = uint64_t(choice.below(1000))};
    if (choice.below(4) == 0) request.stops = {std::string(1, char(choice.below(256)))};
    all.push_back(request);
  }
  return all;
}

struct Written {
  std::vector<int32_t> tokens;
  std::vector<double> log_probs;
  std::string text;
  std::optional<Finish> finish;

  void add(const TokenEvent& event) {
    EXPECT_FALSE(finish) << "an event after the last";
    tokens.push_back(event.token);
    log_probs.push_back(event.log_prob);
    text += event.text;
    finish = event.finish;
  }
  bool operator==(const Written&) const = default;
};

constexpr int kMaxIdleSteps = 10000;

/// Texts of the requests, submitted a few at a time between the steps.
inline std::vector<Written> run_all(Engine& engine, const std::vector<Request>& requests,
                                    Choice choice) {
  std::vector<Written> all(requests.size());
  size_t submitted = 0;
  int64_t first = -1;
  int idle_steps = 0;  // since the last token
  while (submitted < requests.size() || !engine.is_idle()) {
    if (++idle_steps > kMaxIdleSteps) {
      ADD_FAILURE() << "no token in " << kMaxIdleSteps << " steps";
      return all;
    }
    for (int64_t n = choice.below(4); n > 0 && submitted < requests.size(); --n) {
      const int64_t id = engine.submit(requests[submitted]);
      if (submitted++ == 0) first = id;
    }
    for (const TokenEvent& event : engine.step()) {
      all[size_t(event.request - first)].add(event);
      idle_steps = 0;
    }
  }
  EXPECT_EQ(engine.free_pages(), engine.num_pages());
  return all;
}

/// Each request with no other, on one row at a time.
inline std::vector<Written> run_separately(Communicator& tp, const ModelConfig& config, DType dtype,
                                           const CodecPolicy& codec,
                                           const std::vector<Request>& requests) {
  Engine engine(
      tp, config,
      {.dtype = dtype, .sequences = 1, .rows = 1, .share_prefixes = false, .codec = codec});
  fill_engine(engine, config, tp);
  std::vector<Written> all;
  for (const Request& request : requests) {
    all.push_back(run_all(engine, {request}, {1})[0]);
  }
  return all;
}

}  // namespace tandem::test
