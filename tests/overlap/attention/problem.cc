#include "tests/overlap/attention/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "tandem/random.h"

namespace tandem::test {

using schedule::ContextRows;
using schedule::ContextSplit;

std::string ContextCase::describe() const {
  return fmt::format(
      "ranks {} batch {} seq {} keys {} heads {} kv_heads {} head_dim {} {} {} {} window {} "
      "document {} softcap {}",
      ranks, shape.batch, shape.seq, shape.keys, shape.heads, shape.kv_heads, shape.head_dim,
      name_of(shape.dtype), shape.causal ? "causal" : "cross",
      shape.split == ContextSplit::balanced ? "balanced" : "contiguous", window, document,
      shape.softcap);
}

std::vector<ContextCase> generate_cases(int count, DType dtype) {
  std::mt19937 random(7);
  const auto one_of = [&](std::initializer_list<int64_t> values) {
    return values.begin()[random() % values.size()];
  };
  std::vector<ContextCase> cases;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  count = (count + 2) / 3;  // ten times slower
#endif
  for (int i = 0; i < count; ++i) {
    ContextCase c{.ranks = 1 + i % 8};
    ContextShape& s = c.shape;
    s.dtype = dtype;
    s.batch = one_of({1, 1, 2, 3});
    s.seq = one_of({1, 2, 3, c.ranks, 2 * c.ranks - 1, 2 * c.ranks, 17, 37, 64, 90});
    s.kv_heads = one_of({1, 2, c.ranks});
    s.heads = s.kv_heads * one_of({1, 2, 4});
    s.head_dim = one_of({2, 4, 6, 16, 20});
    s.causal = random() % 4 != 0;
    s.keys = s.causal ? s.seq : one_of({1, s.seq, 5, 40, std::min<int64_t>(16 * s.seq, 160)});
    s.split = random() % 3 == 0 ? ContextSplit::contiguous : ContextSplit::balanced;
    if (s.causal && random() % 2 == 0) c.window = one_of({1, 3, 8, 30, 1000});
    if (s.causal && random() % 2 == 0) c.document = one_of({1, 2, 5, 25});
    if (i % 3 == 1) s.softcap = 0.5;
    cases.push_back(c);
  }
  return cases;
}

ContextProblem::ContextProblem(const ContextCase& of, int ranks, int rank)
    : grid{of.shape, ranks, rank} {
  ContextShape& s = grid.shape;
  const ContextRows rows = grid.queries(rank), keys = grid.keys(rank);
  q = make("q", rows, s.seq, grid.q_columns());
  k = make("k", keys, s.keys, grid.kv_columns());
  v = make("v", keys, s.keys, grid.kv_columns());
  dout = make("dout", rows, s.seq, grid.q_columns());
  out = make(nullptr, rows, s.seq, grid.q_columns());
  dq = make(nullptr, rows, s.seq, grid.q_columns());
  dk = make(nullptr, keys, s.keys, grid.kv_columns());
  dv = make(nullptr, keys, s.keys, grid.kv_columns());
  memory_.emplace_back(size_t(s.batch * s.heads * rows.count()) * sizeof(float));
  log_sums = memory_.back().view(DType::f32, {s.batch * s.heads, rows.count()});
  mask.window = of.window;
  if (of.document == 0) return;
  memory_.emplace_back(size_t(s.batch * s.seq) * sizeof(int32_t));
  mask.document_starts = memory_.back().view(DType::i32, {1, s.batch * s.seq});
  std::mt19937 random(3);
  for (int64_t i = 0, start = 0; i < s.batch * s.seq; ++i) {
    if (i % s.seq == 0 || int64_t(random() % uint32_t(of.document)) == 0) start = i % s.seq;
    mask.document_starts.as<int32_t>()[i] = int32_t(start);
  }
}

Tensor ContextProblem::make(const char* name, const ContextRows& rows, int64_t positions,
                            int64_t columns) {
  const int64_t batch = grid.shape.batch, padded = columns + 3, count = batch * rows.count();
  const DType dtype = grid.shape.dtype;
  memory_.emplace_back(size_t(count * padded) * size_of(dtype));
  const Tensor tensor = memory_.back().view(dtype, {count, padded}).narrow(1, 0, columns);
  if (!name) return tensor;
  for (int64_t row = 0; row < count; ++row) {
    const int64_t whole = row / rows.count() * positions + rows.position(row % rows.count());
    for (int64_t c = 0; c < columns; ++c) {
      const float value = normal(5, stream_of(name), uint64_t(whole * columns + c));
      const int64_t i = row * padded + c;
      if (dtype == DType::f32) {
        tensor.as<float>()[i] = value;
      } else {
        tensor.as<BFloat16>()[i] = BFloat16::from_float(value);
      }
    }
  }
  return tensor;
}

void ContextProblem::run(ContextOperator& attention) const {
  attention.forward(q, k, v, out, log_sums, mask);
  attention.backward(q, k, v, out, log_sums, dout, dq, dk, dv, mask);
}

std::vector<std::byte> ContextProblem::result() const {
  std::vector<std::byte> bytes;
  for (const Tensor& t : {out, log_sums, dq, dk, dv}) {
    const size_t size = size_of(t.dtype());
    for (int64_t row = 0; row < t.dim(0); ++row) {
      const auto* const from = t.as<std::byte>() + size_t(row * t.stride(0)) * size;
      bytes.insert(bytes.end(), from, from + size_t(t.dim(1)) * size);
    }
  }
  return bytes;
}

void ContextProblem::clear() {
  for (const Tensor& t : {out, log_sums, dq, dk, dv}) {
    if (t.elements() > 0) std::memset(t.data(), 0xff, t.bytes());
  }
}

}  // namespace tandem::test
