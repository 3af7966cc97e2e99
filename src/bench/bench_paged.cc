#include "bench/bench_paged.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <utility>

#include "comm/exec.h"
#include "kernels/attention/paged_attention.h"
#include "overlap/attention/reference.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tune/measure.h"

namespace tandem {
namespace {

constexpr double kPagedTheta = 10000;
/// Queries are larger than keys by this factor, so that few keys have most of a row's weight.
constexpr float kSharpness = 10;

/// A matrix on the rank's device and on the host.
struct Mirrored {
  Mirrored(const Exec& exec, DType dtype, int64_t rows, int64_t columns)
      : host_memory(size_t(rows * columns) * size_of(dtype)),
        device_memory(host_memory.bytes(), exec.device),
        host(host_memory.view(dtype, {rows, columns})),
        device(device_memory.view(dtype, {rows, columns})) {}
  void upload(const Exec& exec) const { copy(exec, host, device); }
  void download(const Exec& exec) const { copy(exec, device, host); }
  void set(int64_t row, int64_t column, float value) const {
    const int64_t i = row * host.dim(1) + column;
    if (host.dtype() == DType::f32) {
      host.as<float>()[i] = value;
    } else {
      host.as<BFloat16>()[i] = BFloat16::from_float(value);
    }
  }
  /// Random values in [-1, 1) whose period is prime: no two tokens have the same.
  void draw(uint64_t seed) const {
    constexpr int64_t kPeriod = 8191;
    const int64_t columns = host.dim(1), count = host.elements();
    for (int64_t i = 0; i < std::min(count, kPeriod); ++i) {
      set(i / columns, i % columns, 2 * uniform(seed, stream_of("paged bench"), uint64_t(i)) - 1);
    }
    const size_t size = size_of(host.dtype());
    for (int64_t i = kPeriod; i < count; i += kPeriod) {
      std::memcpy(host_memory.data() + size_t(i) * size, host_memory.data(),
                  size_t(std::min(kPeriod, count - i)) * size);
    }
  }

  Memory host_memory, device_memory;
  Tensor host, device;
};

/// i32 on the rank's device.
struct Numbers {
  Numbers(const Exec& exec, const std::vector<int32_t>& values)
      : memory(values.size() * sizeof(int32_t), exec.device) {
    const auto count = int64_t(values.size());
    copy(exec, Tensor::of(std::span(values), {count}), memory.view(DType::i32, {count}));
  }
  Memory memory;
};

std::vector<int32_t> shuffled_pages(int64_t count) {
  std::vector<int32_t> pages(static_cast<size_t>(count));
  std::iota(pages.begin(), pages.end(), 0);
  for (size_t i = pages.size() - 1; i > 0; --i) {
    std::swap(pages[i], pages[philox(3, stream_of("pages"), i)[0] % (i + 1)]);
  }
  return pages;
}

class PagedBenchRun {
 public:
  PagedBenchRun(Communicator& comm, const PagedBench& request)
      : comm_(comm),
        q_(request),
        exec_(make_exec(comm)),
        rope_(exec_, q_.tokens, q_.head_dim, kPagedTheta),
        host_rope_({}, q_.tokens, q_.head_dim, kPagedTheta),
        table_(shuffled_pages(q_.rows * pages_of_row())),
        qkv_(exec_, q_.dtype, q_.rows, q_width() + 2 * kv_width()),
        keys_(exec_, q_.dtype, int64_t(table_.size()) * kPageTokens, kv_width()),
        values_(exec_, q_.dtype, int64_t(table_.size()) * kPageTokens, kv_width()),
        out_(exec_, q_.dtype, q_.rows, q_width()),
        sequences_(exec_, first_numbers(q_.rows)),
        positions_(exec_, std::vector<int32_t>(size_t(q_.rows), int32_t(q_.tokens - 1))),
        pages_(exec_, table_) {
    qkv_.draw(1), keys_.draw(2), values_.draw(3);
    for (int64_t row = 0; row < q_.rows; ++row) {
      for (int64_t i = 0; i < q_width(); ++i) {
        qkv_.set(row, i, kSharpness * float(element(qkv_.host, row, i)));
      }
    }
  }

  PagedBenchResult run() {
    for (const PagedBenchForm& form : paged_bench_forms()) add(form);
    std::vector<BoundCandidate> timed_forms;
    for (const Form& form : forms_) {
      timed_forms.push_back({.name = form.name, .run = [this, &form] { run(form); }});
    }
    const std::vector<BenchTimes> times =
        comm_.on_gpu() ? time_on_gpus(comm_, timed_forms, q_.repeats) : time_on_cpus(timed_forms);
    for (size_t i = 0; i < forms_.size(); ++i) result_.forms[forms_[i].name] = times[i];
    result_.of_bound = max_over_ranks(comm_, result_.of_bound);
    result_.same_bits = max_over_ranks(comm_, double(!result_.same_bits)) == 0;
    return result_;
  }

 private:
  struct Form {
    std::string name;
    bool appends;
    std::unique_ptr<PagedAttention> attention;
  };

  int64_t q_width() const { return q_.heads * q_.head_dim; }
  int64_t kv_width() const { return q_.kv_heads * q_.head_dim; }
  int64_t pages_of_row() const { return (q_.tokens - 1) / kPageTokens + 1; }
  static std::vector<int32_t> first_numbers(int64_t count) {
    std::vector<int32_t> numbers(static_cast<size_t>(count));
    std::iota(numbers.begin(), numbers.end(), 0);
    return numbers;
  }

  /// Adds and checks a form that was asked for, or that the device has.
  void add(const PagedBenchForm& form) {
    const bool is_named = std::ranges::find(q_.forms, form.name) != q_.forms.end();
    if (!q_.forms.empty() && !is_named) return;
    const bool is_there =
        &form == &paged_bench_forms().front() || (comm_.on_gpu() && has_paged_clusters(q_));
    PagedShape shape{q_.heads, q_.kv_heads, q_.head_dim, q_.rows, q_.tokens};
    shape.batch_invariant = q_.batch_invariant, shape.cluster = form.cluster;
    try {
      if (!is_there) throw Unsupported("expected a Hopper GPU, bf16 and head_dim 64 or 128");
      Form made{form.name, form.appends,
                std::make_unique<PagedAttention>(exec_, shape, rope_, q_.window)};
      check(made);
      forms_.push_back(std::move(made));
    } catch (const Unsupported& error) {
      if (is_named) throw Unsupported(fmt::format("bench paged: {}: {}", form.name, error.what()));
      if (&form == &paged_bench_forms().front()) throw;
      result_.refusals[error.what()].push_back(form.name);
    }
  }

  void run(const Form& form) {
    PagedRows rows{sequences_.memory.view(DType::i32, {q_.rows}),
                   positions_.memory.view(DType::i32, {q_.rows}),
                   pages_.memory.view(DType::i32, {q_.rows, pages_of_row()})};
    rows.distinct_sequences = form.appends;
    const auto cache = [&](const Mirrored& all) {
      return all.device_memory.view(
          q_.dtype, {int64_t(table_.size()), kPageTokens, q_.kv_heads, q_.head_dim});
    };
    form.attention->run(exec_, rows, qkv_.device.narrow(1, 0, q_width()),
                        qkv_.device.narrow(1, q_width(), kv_width()),
                        qkv_.device.narrow(1, q_width() + kv_width(), kv_width()), cache(keys_),
                        cache(values_), out_.device);
  }

  /// Runs twice, each on fresh rows and pages.
  void check(const Form& form) {
    uint64_t first = 0;
    for (int again = 0; again < 2; ++again) {
      for (const Mirrored* all : {&qkv_, &keys_, &values_}) all->upload(exec_);
      clear(exec_, out_.device);
      run(form);
      out_.download(exec_);
      const uint64_t bits = XXH3_64bits(out_.host.data(), out_.host.bytes());
      if (again == 0) first = bits;
      result_.same_bits = result_.same_bits && bits == first;
    }
    for (int64_t row = 0; row < q_.rows; ++row) {
      for (const int64_t head : {int64_t(0), q_.heads / 2, q_.heads - 1}) compare(row, head);
    }
  }

  int64_t slot(int64_t row, int64_t token) const {
    return table_[size_t(row * pages_of_row() + token / kPageTokens)] * kPageTokens +
           token % kPageTokens;
  }
  /// A head of a row of q and k, from `column` on.
  std::vector<double> head_of(const Tensor& from, int64_t row, int64_t column) const {
    std::vector<double> head;
    for (int64_t d = 0; d < q_.head_dim; ++d) head.push_back(element(from, row, column + d));
    return head;
  }
  std::vector<double> rotated(std::vector<double> head) const {
    const int64_t half = q_.head_dim / 2;
    const float *const cos = host_rope_.cos(q_.tokens - 1), *const sin =
                                                                host_rope_.sin(q_.tokens - 1);
    for (int64_t i = 0; i < half; ++i) {
      const double low = head[size_t(i)], high = head[size_t(half + i)];
      head[size_t(i)] = low * double(cos[i]) - high * double(sin[i]);
      head[size_t(half + i)] = high * double(cos[i]) + low * double(sin[i]);
    }
    return head;
  }

  /// Compares a head of a row with attention in double. The bound is four standard deviations of
  /// its roundings: of each weight, of queries, and of the elements of the result.
  void compare(int64_t row, int64_t head) {
    const int64_t kv_column = head / (q_.heads / q_.kv_heads) * q_.head_dim;
    const int64_t newest = q_.tokens - 1;
    const std::vector<double> query = rotated(head_of(qkv_.host, row, head * q_.head_dim));
    const auto key = [&](int64_t token) {
      return token == newest ? rotated(head_of(qkv_.host, row, q_width() + kv_column))
                             : head_of(keys_.host, slot(row, token), kv_column);
    };
    const auto value = [&](int64_t token) {
      return token == newest ? head_of(qkv_.host, row, q_width() + kv_width() + kv_column)
                             : head_of(values_.host, slot(row, token), kv_column);
    };
    std::vector<double> scores;
    const int64_t first = q_.window > 0 ? std::max<int64_t>(0, q_.tokens - q_.window) : 0;
    for (int64_t token = first; token < q_.tokens; ++token) {
      const std::vector<double> k = key(token);
      scores.push_back(std::inner_product(query.begin(), query.end(), k.begin(), 0.0) /
                       std::sqrt(double(q_.head_dim)));
    }
    const double top = *std::ranges::max_element(scores);
    std::vector<double> expected(size_t(q_.head_dim));
    double total = 0, squares = 0;
    for (size_t i = 0; i < scores.size(); ++i) {
      const double weight = std::exp(scores[i] - top);
      const std::vector<double> v = value(first + int64_t(i));
      total += weight;
      for (size_t d = 0; d < v.size(); ++d) {
        expected[d] += weight * v[d];
        squares += weight * weight * v[d] * v[d];
      }
    }
    const bool is_f32 = q_.dtype == DType::f32;
    const double rounding = is_f32 ? 0x1p-15 : 0x1p-9 / std::sqrt(3);
    const double of_weights = rounding * std::sqrt(1 + double(kSharpness * kSharpness) / 9);
    const double of_element = is_f32 ? (1 + std::sqrt(double(scores.size()))) * 0x1p-24 : rounding;
    double errors = 0, variance = of_weights * of_weights * squares / (total * total);
    for (size_t d = 0; d < expected.size(); ++d) {
      expected[d] /= total;
      const double off = element(out_.host, row, head * q_.head_dim + int64_t(d)) - expected[d];
      errors += std::isnan(off) ? INFINITY : off * off;
      variance += std::pow(of_element * expected[d], 2);
    }
    result_.of_bound = std::max(result_.of_bound, std::sqrt(errors / variance) / 4);
  }

  std::vector<BenchTimes> time_on_cpus(const std::vector<BoundCandidate>& forms) const {
    std::vector<TimedRun> variants;
    for (const BoundCandidate& form : forms) variants.push_back(timed(comm_, form.run));
    std::vector<BenchTimes> times;
    for (const auto& seconds : measure(comm_, variants, {1, q_.repeats, q_.repeats, 0})) {
      times.push_back(times_of(seconds));
    }
    return times;
  }

  Communicator& comm_;
  PagedBench q_;
  Exec exec_;
  RopeTable rope_, host_rope_;
  std::vector<int32_t> table_;  // pages of each row
  Mirrored qkv_, keys_, values_, out_;
  Numbers sequences_, positions_, pages_;
  std::vector<Form> forms_;
  PagedBenchResult result_;
};

}  // namespace

double PagedBench::bytes() const {
  const int64_t read = window > 0 ? std::min(tokens, window) : tokens;
  return 2.0 * double(rows * read * kv_heads * head_dim) * double(size_of(dtype));
}

const std::vector<PagedBenchForm>& paged_bench_forms() {
  static const std::vector<PagedBenchForm> forms = {
      {"chosen", "the one that generation runs", 0, true},
      {"separate", "chosen, after a kernel that appends keys and values", 0, false},
      {"splits", "a kernel each that appends, attends to splits and adds them", kNoCluster, false},
      {"cluster1", "a block has all keys of a row and key head", 1, true},
      {"cluster2", "2 blocks share them", 2, true},
      {"cluster4", "4 blocks", 4, true},
      {"cluster8", "8 blocks", 8, true},
      {"cluster16", "16 blocks", 16, true}};
  return forms;
}

PagedBenchResult run_paged_bench(Communicator& comm, const PagedBench& request) {
  if (request.heads % request.kv_heads != 0 || request.head_dim % 2 != 0) {
    throw InvalidArgument(
        fmt::format("bench paged: {} heads of {}, {} key heads: expected a multiple of the key "
                    "heads, of an even size",
                    request.heads, request.head_dim, request.kv_heads));
  }
  return PagedBenchRun(comm, request).run();
}

}  // namespace tandem
