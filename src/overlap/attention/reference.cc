#include "overlap/attention/reference.h"

#include <algorithm>
#include <cmath>

#include "core/cpu/scalar.h"
#include "kernels/cpu/attention_rows.h"
#include "kernels/cpu/rope.h"
#include "tandem/collectives.h"

namespace tandem {

using schedule::ContextRows;

double element(const Tensor& tensor, int64_t row, int64_t column) {
  const int64_t i = row * tensor.stride(0) + column;
  return tensor.dtype() == DType::f32 ? double(tensor.as<float>()[i])
                                      : double(tensor.as<BFloat16>()[i].to_float());
}

class ContextReference::Sum {
 public:
  explicit Sum(int64_t columns) : sum_(size_t(columns)), magnitudes_(size_t(columns)) {}
  /// `terms`: magnitude of the terms that the weight is a sum of.
  void add(double weight, double terms, const double* row) {
    for (size_t d = 0; d < sum_.size(); ++d) {
      sum_[d] += weight * row[d];
      magnitudes_[d] += std::abs(terms * row[d]);
    }
  }
  std::vector<double>& value() { return sum_; }
  double magnitude() const { return std::ranges::max(magnitudes_); }

 private:
  std::vector<double> sum_, magnitudes_;
};

ContextReference::ContextReference(Communicator& comm, const ContextGrid& grid,
                                   const RopeTable* rope, const ContextForward& call)
    : comm_(comm), grid_(grid), rope_(rope), mask_(call.mask) {
  q_ = gather(call.q, grid.shape.seq);
  rotate(q_, grid.shape.seq, 1);
  if (grid.shape.wire.is_none()) {
    k_ = gather(call.k, grid.shape.keys);
    v_ = gather(call.v, grid.shape.keys);
    rotate(k_, grid.shape.keys, 1);
    return;
  }
  const auto gather_rounded = [&](const Tensor& local, bool rotates) {
    const Memory rounded = round_keys(local, rotates);
    return gather(rounded.view(local.dtype(), {local.dim(0), local.dim(1)}), grid.shape.keys);
  };
  k_ = gather_rounded(call.k, true);
  v_ = gather_rounded(call.v, false);
}

Memory ContextReference::round_keys(const Tensor& local, bool rotates) const {
  const ContextShape& s = grid_.shape;
  const ContextRows rows = grid_.keys(grid_.rank);
  Memory rounded(size_t(local.elements()) * size_of(local.dtype()));
  std::vector<std::byte> message(s.wire.bytes(s.head_dim, s.dtype));
  cpu::with_type(s.dtype, "reference", [&]<typename T>(T) {
    const Tensor to = rounded.view(s.dtype, {local.dim(0), local.dim(1)});
    for (int64_t i = 0; i < local.dim(0) * s.kv_heads; ++i) {
      const int64_t row = i / s.kv_heads, column = i % s.kv_heads * s.head_dim;
      T* const head = cpu::at_mutable<T>(to, row, column);
      std::copy_n(cpu::at<T>(local, row, column), s.head_dim, head);
      if (rotates && rope_) {
        const int64_t p = angle(row / rows.count(), rows.position(row % rows.count()));
        cpu::rotate(cpu::at<T>(local, row, column), rope_->cos(p), rope_->sin(p), rope_->half(),
                    1.0f, head);
      }
      const Tensor values = Tensor::of(head, {s.head_dim});
      encode(s.wire, values, message);
      decode(s.wire, message, values);
    }
  });
  return rounded;
}

int64_t ContextReference::angle(int64_t sequence, int64_t position) const {
  if (mask_.document_starts.dims() == 0) return position;
  return position - mask_.document_starts.as<int32_t>()[sequence * grid_.shape.seq + position];
}

std::vector<double> ContextReference::gather(const Tensor& local, int64_t positions) const {
  const int64_t batch = grid_.shape.batch, columns = local.dim(1);
  const auto rows_of = [&](int rank) {
    return schedule::context_rows(positions, grid_.world, rank, grid_.shape.split);
  };
  int64_t max_rows = 0;
  for (int rank = 0; rank < grid_.world; ++rank) {
    max_rows = std::max(max_rows, batch * rows_of(rank).count());
  }
  std::vector<float> sent(size_t(max_rows * columns)), all(sent.size() * size_t(grid_.world));
  for (int64_t i = 0; i < local.dim(0) * columns; ++i) {
    sent[size_t(i)] = float(element(local, i / columns, i % columns));
  }
  all_gather(comm_, Tensor::of(sent.data(), {max_rows, columns}),
             Tensor::of(all.data(), {grid_.world * max_rows, columns}));
  std::vector<double> whole(size_t(batch * positions * columns));
  for (int64_t row = 0; row < batch * positions; ++row) {
    const auto [rank, in_rank] =
        schedule::context_owner(positions, grid_.world, row % positions, grid_.shape.split);
    const int64_t from = rank * max_rows + row / positions * rows_of(rank).count() + in_rank;
    std::copy_n(all.data() + from * columns, columns, whole.data() + row * columns);
  }
  return whole;
}

void ContextReference::rotate_row(double* row, int64_t sequence, int64_t position,
                                  double sign) const {
  if (!rope_) return;
  position = angle(sequence, position);
  const int64_t half = rope_->half();
  for (int64_t i = 0; i < half; ++i) {
    const double low = row[i], high = row[i + half];
    const double cos = rope_->cos(position)[i], sin = sign * rope_->sin(position)[i];
    row[i] = low * cos - high * sin;
    row[i + half] = high * cos + low * sin;
  }
}

void ContextReference::rotate(std::vector<double>& rows, int64_t positions, double sign) const {
  const int64_t dim = grid_.shape.head_dim;
  const int64_t count = grid_.shape.batch * positions, columns = int64_t(rows.size()) / count;
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t c = 0; c < columns; c += dim) {
      rotate_row(rows.data() + row * columns + c, row / positions, row % positions, sign);
    }
  }
}

int64_t ContextReference::first_key(int64_t sequence, int64_t position) const {
  if (!grid_.shape.causal) return 0;
  const int64_t start =
      mask_.document_starts.dims() > 0
          ? mask_.document_starts.as<int32_t>()[sequence * grid_.shape.seq + position]
          : 0;
  return std::max(start, mask_.window > 0 ? position - mask_.window + 1 : 0);
}

int64_t ContextReference::end_key(int64_t position) const {
  return grid_.shape.causal ? position + 1 : grid_.shape.keys;
}

const double* ContextReference::q_row(const std::vector<double>& rows, int64_t sequence,
                                      int64_t head, int64_t position) const {
  return rows.data() + (sequence * grid_.shape.seq + position) * grid_.q_columns() +
         head * grid_.shape.head_dim;
}
const double* ContextReference::k_row(const std::vector<double>& rows, int64_t sequence,
                                      int64_t head, int64_t position) const {
  return rows.data() + (sequence * grid_.shape.keys + position) * grid_.kv_columns() +
         head / (grid_.shape.heads / grid_.shape.kv_heads) * grid_.shape.head_dim;
}

double ContextReference::score(int64_t sequence, int64_t head, int64_t query, int64_t key) const {
  const double *q = q_row(q_, sequence, head, query), *k = k_row(k_, sequence, head, key);
  double sum = 0;
  for (int64_t d = 0; d < grid_.shape.head_dim; ++d) sum += q[d] * k[d];
  const double score = sum / std::sqrt(double(grid_.shape.head_dim)), cap = grid_.shape.softcap;
  return cap > 0 ? cap * std::tanh(score / cap) : score;
}

ContextReference::Query ContextReference::query(int64_t sequence, int64_t head,
                                                int64_t position) const {
  const int64_t first = first_key(sequence, position), end = end_key(position);
  std::vector<double> scores;
  for (int64_t key = first; key < end; ++key) {
    scores.push_back(score(sequence, head, position, key));
  }
  const double largest = std::ranges::max(scores);
  Sum sum(grid_.shape.head_dim);
  double total = 0;
  for (int64_t key = first; key < end; ++key) {
    const double weight = std::exp(scores[size_t(key - first)] - largest);
    total += weight;
    sum.add(weight, weight, k_row(v_, sequence, head, key));
  }
  for (double& x : sum.value()) x /= total;
  return {sum.value(), largest + std::log(total), sum.magnitude() / total};
}

double ContextReference::relative_bound(int64_t terms) const {
  const auto largest_norm = [&](const std::vector<double>& rows) {
    double largest = 0;
    for (size_t i = 0; i < rows.size(); i += size_t(grid_.shape.head_dim)) {
      double sum = 0;
      for (size_t d = 0; d < size_t(grid_.shape.head_dim); ++d) sum += rows[i + d] * rows[i + d];
      largest = std::max(largest, std::sqrt(sum));
    }
    return largest;
  };
  constexpr double kUnit = 0x1p-24, kBf16 = 0x1p-9;
  const double dim = double(grid_.shape.head_dim);
  const double operands = grid_.shape.dtype == DType::bf16 && rope_ ? 2 * kBf16 : 0;
  const double score =
      largest_norm(q_) * largest_norm(k_) / std::sqrt(dim) * (operands + (dim + 8) * kUnit);
  return std::expm1(2 * score) + double(terms + 16) * kUnit;
}

void ContextReference::gather_gradients(const ContextBackward& call) {
  const int64_t rows = call.dout.dim(0), heads = grid_.shape.heads, dim = grid_.shape.head_dim;
  const int64_t local = grid_.queries(grid_.rank).count();
  std::vector<float> sums(size_t(rows * heads)), deltas(sums.size());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t h = 0; h < heads; ++h) {
      const size_t i = size_t(row * heads + h);
      sums[i] = float(element(call.log_sums, row / local * heads + h, row % local));
      double delta = 0;
      for (int64_t d = 0; d < dim; ++d) {
        delta += element(call.dout, row, h * dim + d) * element(call.out, row, h * dim + d);
      }
      deltas[i] = float(delta);
    }
  }
  dout_ = gather(call.dout, grid_.shape.seq);
  log_sums_ = gather(Tensor::of(sums.data(), {rows, heads}), grid_.shape.seq);
  delta_ = gather(Tensor::of(deltas.data(), {rows, heads}), grid_.shape.seq);
}

ContextReference::Pair ContextReference::pair(int64_t sequence, int64_t head, int64_t query,
                                              int64_t key) const {
  const size_t at = size_t((sequence * grid_.shape.seq + query) * grid_.shape.heads + head);
  const double score = this->score(sequence, head, query, key), cap = grid_.shape.softcap;
  const double p = std::exp(score - log_sums_[at]);
  const double *dout = q_row(dout_, sequence, head, query), *v = k_row(v_, sequence, head, key);
  double dp = -delta_[at], terms = std::abs(delta_[at]);
  for (int64_t d = 0; d < grid_.shape.head_dim; ++d) {
    dp += dout[d] * v[d];
    terms += std::abs(dout[d] * v[d]);
  }
  const double of_cap = cap > 0 ? 1 - score / cap * (score / cap) : 1;
  const double scale = of_cap * p / std::sqrt(double(grid_.shape.head_dim));
  return {p, scale * dp, scale * terms};
}

ContextReference::Gradient ContextReference::dq(int64_t sequence, int64_t head,
                                                int64_t position) const {
  Sum sum(grid_.shape.head_dim);
  for (int64_t key = first_key(sequence, position); key < end_key(position); ++key) {
    const Pair of = pair(sequence, head, position, key);
    sum.add(of.dscore, of.terms, k_row(k_, sequence, head, key));
  }
  rotate_row(sum.value().data(), sequence, position, -1);
  return {sum.value(), sum.magnitude()};
}

ContextReference::Key ContextReference::key(int64_t sequence, int64_t kv_head,
                                            int64_t position) const {
  Sum dk(grid_.shape.head_dim), dv(grid_.shape.head_dim);
  const int64_t group = grid_.shape.heads / grid_.shape.kv_heads;
  for (int64_t query = 0; query < grid_.shape.seq; ++query) {
    if (position < first_key(sequence, query) || position >= end_key(query)) continue;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const auto [p, dscore, terms] = pair(sequence, head, query, position);
      dk.add(dscore, terms, q_row(q_, sequence, head, query));
      dv.add(p, p, q_row(dout_, sequence, head, query));
    }
  }
  rotate_row(dk.value().data(), sequence, position, -1);
  return {{dk.value(), dk.magnitude()}, {dv.value(), dv.magnitude()}};
}

}  // namespace tandem
