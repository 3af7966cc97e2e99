// Cases of attention over pages, and their runs on any device.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/exec.h"
#include "kernels/attention/paged_attention.h"
#include "tandem/random.h"

namespace tandem::test {

/// Random choices of a case.
struct Draw {
  uint64_t trial, count = 0;
  int64_t up_to(int64_t bound) { return int64_t(philox(7, trial, count++)[0] % uint64_t(bound)); }
  double unit() { return double(uniform(8, trial, count++)); }
};

inline Tensor all_bytes_of(const Memory& memory) {
  return memory.view(DType::u8, {int64_t(memory.bytes())});
}

/// Memory of the CPU or the GPU with its view.
struct Values {
  Values(const Exec& exec, DType dtype, std::initializer_list<int64_t> shape)
      : memory(elements(shape) * size_of(dtype), exec.device), view(memory.view(dtype, shape)) {}
  static size_t elements(std::initializer_list<int64_t> shape) {
    size_t all = 1;
    for (const int64_t size : shape) all *= size_t(size);
    return all;
  }
  double get(int64_t i) const {
    if (view.dtype() == DType::f32) return double(view.as<float>()[i]);
    return double(view.as<BFloat16>()[i].to_float());
  }
  void set(int64_t i, double value) const {
    if (view.dtype() == DType::f32) {
      view.as<float>()[i] = float(value);
    } else {
      view.as<BFloat16>()[i] = BFloat16::from_float(float(value));
    }
  }
  Memory memory;
  Tensor view;
};

inline Values on_device(const Exec& exec, const Values& host,
                        std::initializer_list<int64_t> shape) {
  Values result(exec, host.view.dtype(), shape);
  copy(exec, all_bytes_of(host.memory), all_bytes_of(result.memory));
  return result;
}
inline Memory to_host(const Exec& exec, const Memory& memory) {
  Memory result(memory.bytes());
  copy(exec, all_bytes_of(memory), all_bytes_of(result));
  return result;
}
/// Random in [-1, 1), none like another: copies of a key would hide which one was read.
inline Values random_values(DType dtype, int64_t rows, int64_t columns, uint64_t seed) {
  Values result(Exec{}, dtype, {rows, columns});
  for (int64_t i = 0; i < rows * columns; i += 4) {
    const auto words = philox(seed, 4, uint64_t(i));
    for (int64_t j = i; j < std::min(i + 4, rows * columns); ++j) {
      result.set(j, double(words[size_t(j - i)]) * 0x1p-31 - 1);
    }
  }
  return result;
}

/// Tokens of a sequence with the new ones, and the new ones.
struct Lengths {
  int32_t all, new_ones;
};

/// Sequences with cached keys and values, and the new rows of each.
struct PagedCase {
  PagedCase(DType dtype, const PagedShape& given, int64_t window_, std::vector<Lengths> lengths_,
            Draw& draw)
      : shape(given),
        window(window_),
        lengths(std::move(lengths_)),
        pages(lengths.size() * size_t(line())),
        keys(random_values(dtype, slots(), kv_width(), 1)),
        values(random_values(dtype, slots(), kv_width(), 2)),
        qkv(random_values(dtype, count_rows(), width(), 3)) {
    shape.rows = count_rows() + 1;
    std::iota(pages.begin(), pages.end(), 0);
    for (size_t i = pages.size() - 1; i > 0; --i) {
      std::swap(pages[i], pages[size_t(draw.up_to(int64_t(i) + 1))]);
    }
  }
  int64_t line() const { return (shape.max_tokens - 1) / kPageTokens + 1; }
  int64_t kv_width() const { return shape.kv_heads * shape.head_dim; }
  int64_t width() const { return shape.heads * shape.head_dim + 2 * kv_width(); }
  int64_t slots() const { return int64_t(pages.size()) * kPageTokens; }
  int64_t count_rows() const {
    int64_t rows = 0;
    for (const Lengths& each : lengths) rows += each.new_ones;
    return rows;
  }
  int64_t first_row(size_t sequence) const {
    int64_t rows = 0;
    for (size_t i = 0; i < sequence; ++i) rows += lengths[i].new_ones;
    return rows;
  }
  DType dtype() const { return qkv.view.dtype(); }
  int64_t group() const { return shape.heads / shape.kv_heads; }
  /// Index of a token's key and value among those of all pages.
  int64_t slot(size_t sequence, int64_t token) const {
    const int32_t page = pages[sequence * size_t(line()) + size_t(token / kPageTokens)];
    return page * kPageTokens + token % kPageTokens;
  }
  int64_t first_key(int64_t position) const {
    return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
  }

  PagedShape shape;
  int64_t window;
  std::vector<Lengths> lengths;
  std::vector<int32_t> pages;
  Values keys, values;  ///< of all pages: rotated keys
  Values qkv;           ///< new rows, in the order of the sequences
};

/// Small case of any shape, whose keys have about the same weight.
inline PagedCase draw_case(uint64_t trial, DType dtype) {
  Draw draw{trial};
  const int64_t dims[] = {16, 32, 64, 80, 96, 112, 128}, groups[] = {1, 2, 3, 4, 7, 8, 12};
  const int64_t sequences = 1 + draw.up_to(4);
  PagedShape shape{};
  shape.head_dim = dims[draw.up_to(7)];
  shape.kv_heads = 1 + draw.up_to(3);
  shape.heads = shape.kv_heads * groups[draw.up_to(7)];
  shape.max_tokens = 1 + draw.up_to(400);
  const int64_t window = draw.up_to(3) == 0 ? 1 + draw.up_to(shape.max_tokens) : 0;
  std::vector<Lengths> lengths;
  for (int64_t s = 0; s < sequences; ++s) {
    const auto all = int32_t(1 + draw.up_to(shape.max_tokens));
    lengths.push_back({all, draw.up_to(2) == 0 ? 1 : int32_t(1 + draw.up_to(all))});
  }
  return PagedCase(dtype, shape, window, lengths, draw);
}

/// Division of the new rows of a case into runs.
struct PagedRuns {
  int64_t max_rows;  ///< of a sequence in a run
  bool together;     ///< the sequences' rows of a run
  bool as_chunks;
  bool batch_invariant = true;  ///< as in PagedShape
  int64_t singles = 0;          ///< of one run: its first sequences, of one row, are in no chunk
  int64_t padding = 0;          ///< of one run: rows of padding at its end, at most 1
  int cluster = 0;              ///< as in PagedShape
  bool appends = false;         ///< PagedRows::distinct_sequences where that holds
};
/// Runs whose sums may be in any order.
inline PagedRuns in_any_order(PagedRuns runs) {
  runs.batch_invariant = false;
  return runs;
}
constexpr PagedRuns kAtOnce{1 << 20, true, false};

/// Outputs of a case's new rows, [rows, heads * head_dim], in the order of the sequences, then
/// those of padding.
class PagedRunner {
 public:
  PagedRunner(const Exec& exec, const PagedCase& c, const PagedRuns& runs)
      : exec_(exec),
        c_(c),
        runs_(runs),
        rope_(exec, c.shape.max_tokens, c.shape.head_dim, kRopeTheta),
        keys_(on_device(exec, c.keys, {pages(), kPageTokens, c.shape.kv_heads, c.shape.head_dim})),
        values_(
            on_device(exec, c.values, {pages(), kPageTokens, c.shape.kv_heads, c.shape.head_dim})),
        attention_(exec, shape(), rope_, c.window),
        done_(c.lengths.size(), 0),
        outputs_(c.lengths.size() + 1) {}
  static constexpr double kRopeTheta = 10000;

  /// Throws if an output has changed memory around it.
  std::vector<std::byte> run() {
    for (std::vector<size_t> left = unfinished(); !left.empty(); left = unfinished()) {
      run(runs_.together ? left : std::vector<size_t>{left[0]});
    }
    std::vector<std::byte> all;
    for (const auto& each : outputs_) all.insert(all.end(), each.begin(), each.end());
    return all;
  }
  /// Keys and values of all pages.
  std::vector<std::byte> cached() const {
    std::vector<std::byte> all;
    for (const Memory* memory : {&keys_.memory, &values_.memory}) {
      const Memory found = to_host(exec_, *memory);
      all.insert(all.end(), found.data(), found.data() + found.bytes());
    }
    return all;
  }

 private:
  static constexpr int64_t kGuard = 8;  // elements after each row of outputs
  int64_t pages() const { return int64_t(c_.pages.size()); }
  PagedShape shape() const {
    PagedShape shape = c_.shape;
    const bool has_kernel = c_.dtype() == DType::bf16 && shape.head_dim <= kMaxChunkHead;
    if (runs_.as_chunks && has_kernel) shape.singles = std::max<int64_t>(1, runs_.singles);
    shape.batch_invariant = runs_.batch_invariant;
    shape.cluster = runs_.cluster;
    return shape;
  }
  std::vector<size_t> unfinished() const {
    std::vector<size_t> all;
    for (size_t s = 0; s < done_.size(); ++s) {
      if (done_[s] < c_.lengths[s].new_ones) all.push_back(s);
    }
    return all;
  }
  Values upload(const std::vector<int32_t>& numbers, std::initializer_list<int64_t> to) const {
    Values result(exec_, DType::i32, to);
    const auto count = int64_t(numbers.size());
    copy(exec_, Tensor::of(std::span(numbers), {count}), result.memory.view(DType::i32, {count}));
    return result;
  }

  void run(const std::vector<size_t>& which) {
    std::vector<int32_t> sequences, positions;
    std::vector<PagedChunk> chunks;
    std::vector<int64_t> sources;
    for (const size_t s : which) {
      const Lengths& of = c_.lengths[s];
      const int64_t count = std::min<int64_t>(runs_.max_rows, of.new_ones - done_[s]);
      chunks.push_back({int64_t(sequences.size()), count});
      for (int64_t i = 0; i < count; ++i) {
        sequences.push_back(int32_t(s));
        positions.push_back(int32_t(of.all - of.new_ones + done_[s] + i));
        sources.push_back(c_.first_row(s) + done_[s] + i);
      }
      done_[s] += int32_t(count);
    }
    const auto written = int64_t(sequences.size()), rows = written + runs_.padding;
    sequences.resize(size_t(rows), -1), positions.resize(size_t(rows), 7);
    const int64_t out_width = c_.shape.heads * c_.shape.head_dim, kv_width = c_.kv_width();
    Values host_qkv(Exec{}, c_.dtype(), {rows, c_.width()});
    const size_t bytes = size_t(c_.width()) * size_of(c_.dtype());
    for (size_t i = 0; i < sources.size(); ++i) {
      std::memcpy(host_qkv.memory.data() + i * bytes,
                  c_.qkv.memory.data() + size_t(sources[i]) * bytes, bytes);
    }
    const Values qkv = on_device(exec_, host_qkv, {rows, c_.width()});
    const int64_t out_stride = out_width + kGuard;
    const Values host_out(Exec{}, c_.dtype(), {rows + 2, out_stride});
    std::memset(host_out.memory.data(), 0xff, host_out.memory.bytes());
    const Values guarded = on_device(exec_, host_out, {rows + 2, out_stride});
    const Tensor out = guarded.view.narrow(0, 1, rows).narrow(1, 0, out_width);
    const Values on_s = upload(sequences, {rows}), on_p = upload(positions, {rows});
    const Values on_pages = upload(c_.pages, {int64_t(c_.lengths.size()), c_.line()});
    PagedRows paged{on_s.view, on_p.view, on_pages.view};
    if (runs_.as_chunks) paged.chunks.assign(chunks.begin() + runs_.singles, chunks.end());
    const auto singles =
        chunks.begin() + (runs_.as_chunks ? runs_.singles : int64_t(chunks.size()));
    paged.distinct_sequences = runs_.appends && std::all_of(chunks.begin(), singles, [](auto each) {
                                 return each.rows == 1;
                               });
    attention_.run(
        exec_, paged, qkv.view.narrow(1, 0, out_width), qkv.view.narrow(1, out_width, kv_width),
        qkv.view.narrow(1, out_width + kv_width, kv_width), keys_.view, values_.view, out);
    const Memory found = to_host(exec_, guarded.memory);
    const auto append_rows = [&](std::vector<std::byte>& all, int64_t first, int64_t count) {
      const size_t size = size_of(c_.dtype());
      for (int64_t row = first; row < first + count; ++row) {
        const std::byte* const from = found.data() + size_t((row + 1) * out_stride) * size;
        all.insert(all.end(), from, from + size_t(out_width) * size);
      }
    };
    for (size_t i = 0; i < which.size(); ++i) {
      append_rows(outputs_[which[i]], chunks[i].first, chunks[i].rows);
    }
    outputs_.back().clear();
    append_rows(outputs_.back(), written, runs_.padding);
    check_guards(found, rows, out_width);
  }

  void check_guards(const Memory& found, int64_t rows, int64_t width) const {
    const auto size = int64_t(size_of(c_.dtype()));
    for (int64_t i = 0; i < int64_t(found.bytes()); ++i) {
      const int64_t row = i / size / (width + kGuard), column = i / size % (width + kGuard);
      const bool is_out = row > 0 && row <= rows && column < width;
      if (!is_out && found.data()[i] != std::byte{0xff}) {
        throw std::logic_error("paged_attention: memory around its outputs has changed");
      }
    }
  }

  Exec exec_;
  const PagedCase& c_;
  PagedRuns runs_;
  RopeTable rope_;
  Values keys_, values_;
  PagedAttention attention_;
  std::vector<int32_t> done_;
  std::vector<std::vector<std::byte>> outputs_;
};

inline std::vector<std::byte> run_paged(const Exec& exec, const PagedCase& c,
                                        const PagedRuns& runs) {
  return PagedRunner(exec, c, runs).run();
}

}  // namespace tandem::test
