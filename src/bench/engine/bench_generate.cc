#include "bench/engine/bench_generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "bench/engine/requests.h"
#include "comm/exec.h"
#include "core/cpu/parallel.h"
#include "core/system/machine.h"
#include "core/system/process/clock.h"
#include "engine/infer/engine.h"
#include "engine/model/published_models.h"
#include "engine/model/weight_writer.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tune/measure.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

/// Steps of an engine, with the times of its tokens.
class TimedEngine {
 public:
  TimedEngine(Engine& engine, const ModelConfig& config, const GenerateBench& q)
      : engine_(engine), config_(config), q_(q) {}

  /// Request `index` of a seeded sequence, which arrived at `seconds`.
  void submit(int64_t index, double seconds) {
    Request request;
    int64_t length = q_.prompt;
    if (q_.min_prompt > 0) {
      const uint64_t lengths = uint64_t(q_.prompt - q_.min_prompt + 1);
      length -= int64_t(philox(3, uint64_t(index), 0)[0] % lengths);
    }
    for (int64_t i = 0; i < length; ++i) {
      request.prompt.push_back(
          int32_t(philox(1, uint64_t(index), uint64_t(i))[0] % uint64_t(config_.vocab)));
    }
    request.max_tokens = q_.max_tokens;
    request.sampling = q_.sampling;
    request.eos_token_ids = {-1};
    engine_.submit(std::move(request));
    tokens_.push_back({});
    last_.push_back(seconds);
  }
  void step() {
    const int64_t rows = engine_.stats().rows;
    const double begin = seconds();
    const std::vector<TokenEvent> events = engine_.step();
    const double now = seconds();
    for (const TokenEvent& event : events) {
      if (event.finish == Finish::failed) throw InvalidArgument(event.error);
      const auto text = size_t(event.request - first_id_);
      (tokens_[text].empty() ? first : next).push_back(now - last_[text]);
      tokens_[text].push_back({event.token, event.log_prob});
      last_[text] = now;
      ++num_tokens;
    }
    if (int64_t(events.size()) == q_.batch && engine_.stats().rows - rows == q_.batch) {
      steps.push_back(now - begin);
    }
  }
  double seconds() const { return seconds_since(begin_); }
  void restart() {
    first_id_ += int64_t(tokens_.size());
    tokens_.clear(), last_.clear();
    begin_ = Clock::now();
  }

  using Tokens = std::vector<std::pair<int32_t, double>>;
  const Tokens& tokens(size_t text) const { return tokens_[text]; }

  std::vector<double> first, next, steps;
  int64_t num_tokens = 0;

 private:
  Engine& engine_;
  const ModelConfig& config_;
  const GenerateBench& q_;
  Clock::time_point begin_ = Clock::now();
  int64_t first_id_ = 0;
  std::vector<Tokens> tokens_;  // with log-probabilities, by request
  std::vector<double> last_;    // time of its last token, or arrival
};

/// Random weights with a period, which is prime: those of a new model take a minute to draw at the
/// sizes of GPUs.
class PeriodicWeights {
 public:
  explicit PeriodicWeights(Communicator& tp) : writer_(make_exec(tp)) {
    for (const bool over_tp : {false, true}) {
      for (int64_t i = 0; i < kPeriod; ++i) {
        const auto seed = uint64_t(over_tp ? tp.rank() : tp.size());
        values_[over_tp].push_back(0.02f * normal(seed, stream_of("weights"), uint64_t(i)));
      }
    }
  }
  void set(const Parameter& p, const WeightViews& to) {
    const LocalShard shard = local_shard(p);
    const std::vector<float>& some = values_[p.sharding.over_tp()];
    writer_.write(shard, to, DType::bf16, [&](int64_t first_row, const Tensor& out) {
      int64_t at = first_row * shard.columns % kPeriod;
      for (int64_t i = 0; i < out.elements(); ++i, at = at + 1 < kPeriod ? at + 1 : 0) {
        const float value = p.shape.size() == 1 ? p.initial : some[size_t(at)];
        if (out.dtype() == DType::bf16) {
          out.as<BFloat16>()[i] = BFloat16::from_float(value);
        } else {
          out.as<float>()[i] = value;
        }
      }
    });
  }

 private:
  static constexpr int64_t kPeriod = 1'000'003;
  WeightWriter writer_;
  std::array<std::vector<float>, 2> values_;  // of replicated matrices, of those over TP ranks
};

/// Sets random weights.
void set_weights(Communicator& tp, Engine& engine) {
  if (!tp.on_gpu()) return engine.initialize(1);
  PeriodicWeights weights(tp);
  engine.set_weights([&](const Parameter& p, const WeightViews& to) { weights.set(p, to); });
  wait(make_exec(tp));
}

/// Submits `batch` requests and runs them.
void run_batch(Communicator& tp, Engine& engine, TimedEngine& timed, int64_t batch) {
  tp.barrier("bench");
  timed.restart();
  for (int64_t i = 0; i < batch; ++i) timed.submit(i, 0);
  while (!engine.is_idle()) timed.step();
}

/// Requests that arrive at random times, as a Poisson process; rank 0's clock counts.
void run_arrivals(Communicator& tp, Engine& engine, TimedEngine& timed, const GenerateBench& q) {
  const std::vector<double> arrivals = draw_arrivals(2, q.requests, q.rate);
  timed.restart();
  int64_t submitted = 0;
  while (submitted < q.requests || !engine.is_idle()) {
    int64_t arrived = submitted;
    if (tp.rank() == 0) {
      if (engine.is_idle()) {
        const double idle = arrivals[size_t(submitted)] - timed.seconds();
        std::this_thread::sleep_for(std::chrono::duration<double>(std::max(0.0, idle)));
      }
      while (arrived < q.requests && arrivals[size_t(arrived)] <= timed.seconds()) ++arrived;
    }
    const auto blobs = tp.exchange(std::as_bytes(std::span(&arrived, 1)), "arrivals");
    std::memcpy(&arrived, blobs[0].data(), sizeof arrived);
    for (; submitted < arrived; ++submitted) {
      timed.submit(submitted, arrivals[size_t(submitted)]);
    }
    timed.step();
  }
}

/// Bytes per second that this rank's kernel threads read, while all ranks do.
double read_rate(Communicator& tp) {
  constexpr int64_t kElements = int64_t{32} << 20;
  const Memory memory(size_t(kElements) * sizeof(float));
  const auto* const values = reinterpret_cast<const float*>(memory.data());
  std::vector<float> sums(size_t(kElements >> 16));
  const TimedRun run = timed(tp, [&] {
    cpu::parallel_ranges(int64_t(sums.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = block << 16; i < (block + 1) << 16; ++i) sum += values[i];
        sums[size_t(block)] = sum;
      }
    });
  });
  double best = HUGE_VAL;
  for (int i = 0; i < 5; ++i) best = std::min(best, run());
  if (std::accumulate(sums.begin(), sums.end(), 0.0f) != 0)
    throw Error("read_rate: memory is not 0");
  return double(memory.bytes()) / best;
}

double step_bytes(const ModelConfig& config, const GenerateBench& q) {
  const auto hidden = double(config.hidden), head_dim = double(config.head_dim);
  const auto heads = double(config.heads), kv_heads = double(config.kv_heads);
  const double attention = hidden * head_dim * (2 * heads + 2 * kv_heads);
  const double mlps =
      double(std::clamp<int64_t>(config.experts, 1, std::max<int64_t>(1, q.batch * config.top_k)));
  const double mlp = 3 * hidden * double(config.ffn_per_expert());
  const double tokens = double(q.batch) * (double(q.prompt) + double(q.max_tokens) / 2);
  const double weights =
      double(config.layers) * (attention + mlps * mlp) + hidden * double(config.vocab);
  const double cached = 2 * double(config.layers) * tokens * kv_heads * head_dim;
  const auto size = double(size_of(parse_dtype(q.dtype)));
  return weights * q.bytes_per_weight() + cached * size;
}

/// On GPUs, products of other numbers of rows have other bits: the log-probabilities are close up
/// to the first token that differs, with that one.
bool is_close(const TimedEngine::Tokens& a, const TimedEngine::Tokens& b) {
  constexpr double kBound = 0.1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (!(std::abs(a[i].second - b[i].second) <= kBound)) return false;
    if (a[i].first != b[i].first) return true;
  }
  return a.size() == b.size();
}

}  // namespace

ModelConfig generate_bench_config(const GenerateBench& q, bool on_gpus) {
  ModelConfig config = published_config("bench generate", q.model, q.layers);
  if (q.vocab > 0) config.vocab = q.vocab;
  config.max_seq = q.prompt + q.max_tokens;
  config.check(q.tp);
  if (on_gpus) check_gpu_generation(config, q.tp, parse_dtype(q.dtype), q.format());
  if (q.format()) check_coded_weights(config, q.tp, *q.format());
  if ((q.rate > 0) != (q.requests > 0)) {
    throw InvalidArgument(
        fmt::format("bench generate: --rate {} --requests {}: expected both or "
                    "none",
                    q.rate, q.requests));
  }
  if (q.min_prompt > q.prompt) {
    throw InvalidArgument(fmt::format(
        "bench generate: --min-prompt {}: expected at most --prompt {}", q.min_prompt, q.prompt));
  }
  const double bytes = weight_bytes(config, parse_dtype(q.dtype), q.format());
  const auto machine = double(this_machine().memory_bytes);
  if (!on_gpus && machine > 0 && bytes > machine) {
    throw InvalidArgument(fmt::format(
        "bench generate: weights of {} layers need {:.3g} GB: expected at most this machine's "
        "{:.3g} GB",
        config.layers, bytes / 1e9, machine / 1e9));
  }
  return config;
}

GenerateBenchResult run_generate_bench(Communicator& tp, const GenerateBench& q) {
  const ModelConfig config = generate_bench_config(q, tp.on_gpu());
  EngineOptions options;
  options.dtype = parse_dtype(q.dtype);
  options.sequences = q.batch;
  options.mixed_rows = q.mixed_rows;
  options.batch_invariant = q.batch_invariant;
  options.runs_ahead = q.runs_ahead;
  set_step_rows(options, q.prompt_rows, tp.on_gpu());
  options.weights = q.format();
  options.share_prefixes = false;  // each batch has the same prompts
  clear_receipts();
  Engine engine(tp, config, options);
  GenerateBenchResult result;
  const Clock::time_point unset = Clock::now();
  set_weights(tp, engine);
  result.load_s = seconds_since(unset);
  result.weight_bytes = int64_t(engine.weight_bytes());

  TimedEngine warm(engine, config, q);
  run_batch(tp, engine, warm, q.batch);
  TimedEngine::Tokens together = warm.tokens(size_t(q.batch - 1));
  warm.restart();
  warm.submit(q.batch - 1, 0);
  while (!engine.is_idle()) warm.step();
  result.is_same_separately =
      tp.on_gpu() ? is_close(together, warm.tokens(0)) : together == warm.tokens(0);
  warm.restart();

  TimedEngine timed = warm;
  timed.first.clear(), timed.next.clear(), timed.steps.clear();
  timed.num_tokens = 0;
  const Engine::Stats before = engine.stats();
  const Clock::time_point begin = Clock::now();
  if (q.rate > 0) {
    run_arrivals(tp, engine, timed, q);
  } else {
    for (int i = 0; i < q.repeats; ++i) run_batch(tp, engine, timed, q.batch);
  }
  result.tokens_per_s = double(timed.num_tokens) / seconds_since(begin);
  const Engine::Stats& after = engine.stats();
  result.logit_bytes = double(after.logit_bytes - before.logit_bytes) / double(timed.num_tokens);
  result.ahead = double(after.ahead - before.ahead) / double(after.steps - before.steps);
  result.first_token = times_of(timed.first);
  result.first_token_p99_us = percentile(timed.first, 0.99) * 1e6;
  result.next_token_p99_us = percentile(timed.next, 0.99) * 1e6;
  if (!timed.next.empty()) result.next_token = times_of(timed.next);
  if (!timed.steps.empty()) result.token_step = times_of(timed.steps);
  result.step_bytes = step_bytes(config, q);
  result.preempted = after.preempted;
  result.receipts = receipts();
  result.memory_bytes = memory_in_use(make_exec(tp));
  if (!tp.on_gpu()) result.read_bytes_per_s = read_rate(tp) * tp.size();
  return result;
}

}  // namespace tandem
