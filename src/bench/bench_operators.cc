#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "bench/bench_case.h"
#include "comm/workspace.h"
#include "overlap/registry.h"
#include "tandem/random.h"

namespace tandem {

BenchMatrix::BenchMatrix(DType dtype, int64_t rows, int64_t columns, uint64_t seed, BenchData data)
    : memory(size_t(rows * columns) * size_of(dtype)), tensor(memory.view(dtype, {rows, columns})) {
  std::vector<float> row(static_cast<size_t>(columns));
  for (int64_t i = 0; i < tensor.elements(); i += columns) {
    if (data == BenchData::normal) {
      fill_normal(row, seed, 0, uint64_t(i));
    } else {
      for (int64_t j = 0; j < columns; ++j) {
        row[size_t(j)] = uniform(seed, 0, uint64_t(i + j)) * 2 - 1;
      }
    }
    if (dtype == DType::f32) {
      std::ranges::copy(row, tensor.as<float>() + i);
    } else {
      std::ranges::transform(row, tensor.as<BFloat16>() + i, BFloat16::from_float);
    }
  }
}

namespace {
double magnitude(const Tensor& values, int64_t i) {
  return std::fabs(values.dtype() == DType::f32 ? double(values.as<float>()[i])
                                                : double(values.as<BFloat16>()[i].to_float()));
}
}  // namespace

double largest_magnitude(const Tensor& values) {
  double largest = 0;
  for (int64_t i = 0; i < values.elements(); ++i) largest = std::max(largest, magnitude(values, i));
  return largest;
}

double largest_row(const Tensor& matrix) {
  double largest = 0;
  for (int64_t i = 0; i < matrix.dim(0); ++i) {
    double sum = 0;
    for (int64_t j = 0; j < matrix.dim(1); ++j) sum += magnitude(matrix, i * matrix.dim(1) + j);
    largest = std::max(largest, sum);
  }
  return largest;
}

namespace {

/// Allows uncompressed candidates, too.
OpDesc whole_desc(const BenchRequest& r) {
  return {.m = r.m,
          .n = r.n,
          .k = r.k,
          .dtype = r.dtype,
          .add_norm = r.add_norm,
          .wire = r.wire,
          .allow_uncompressed = !r.wire.is_none()};
}

/// Operator, timed with each of its candidates.
class OperatorCase : public BenchCase {
 public:
  OperatorCase(Communicator& comm, const BenchRequest& r, const OperatorRow& row)
      : comm_(comm),
        row_(row),
        desc_(describe_shard(row, comm, whole_desc(r))),
        operator_(
            make_operator(row, comm, desc_, {Strategy::automatic, r.chunks}, Choosing::first)),
        x_(matrix(desc_.x, 1 + uint64_t(comm.rank()))),
        whole_x_(desc_.dtype, desc_.x.rows == desc_.m ? 0 : desc_.m, desc_.k, 1),
        weight_(matrix(desc_.weight, 100 + uint64_t(comm.rank()))),
        out_(matrix(desc_.out, 0)),
        expected_(matrix(desc_.out, 0)),
        product_(desc_.out.dtype, row.gradient ? desc_.out.rows : desc_.m, desc_.out.columns, 0),
        residual_(desc_.dtype, desc_.add_norm ? desc_.m : 0, desc_.n, 2),
        gain_(desc_.dtype, 1, desc_.n, 3),
        hidden_(desc_.dtype, residual_.tensor.dim(0), desc_.n, 4),
        add_norm_{residual_.tensor, gain_.memory.view(desc_.dtype, {desc_.n}), hidden_.tensor,
                  1e-5f} {}

  std::vector<BoundCandidate> forms() override {
    std::vector<BoundCandidate> all;
    for (const Candidate& candidate : operator_->candidates()) {
      all.push_back({candidate.name, candidate.form, [this, &candidate] { run(candidate); },
                     candidate.encoded, candidate.chunks});
    }
    return all;
  }
  std::string baseline() const override { return "whole collective and GEMM, the fastest form"; }
  void gemm_alone() override {
    row_.gemm(desc_.x.rows == desc_.m ? x_.tensor : whole_x_.tensor, weight_.tensor,
              product_.tensor);
  }
  void reference() override { row_.reference(comm_, operands(expected_)); }
  void reset() override {
    if (!row_.gradient) return;
    for (const BenchMatrix* each : {&out_, &expected_}) {
      std::fill_n(each->tensor.as<float>(), each->tensor.elements(), 0.0f);
    }
  }
  double codec_error() override {
    gemm_alone();
    const double largest = largest_magnitude(expected());
    if (largest == 0) return 0;
    return row_.codec_error(
               desc_, comm_.size(),
               {largest_row(weight_.tensor), largest_magnitude(product_.tensor), largest}) /
           largest;
  }
  int64_t counted_bytes() const override { return counted_bytes_; }
  Tensor result() const override { return out_.tensor; }
  Tensor expected() const override { return expected_.tensor; }
  int64_t wire_bytes() const override { return row_.bytes(comm_.size(), desc_); }

 private:
  static BenchMatrix matrix(const OperandDesc& d, uint64_t seed) {
    return BenchMatrix(d.dtype, d.rows, d.columns, seed);
  }
  void run(const Candidate& candidate) {
    const uint64_t before = comm_.workspace().bytes_sent;
    candidate.run(operands(out_));
    if (candidate.encoded) counted_bytes_ = int64_t(comm_.workspace().bytes_sent - before);
  }
  Operands operands(const BenchMatrix& out) const {
    return {x_.tensor, weight_.tensor, out.tensor,
            nullptr,   nullptr,        desc_.add_norm ? &add_norm_ : nullptr};
  }

  Communicator& comm_;
  const OperatorRow& row_;
  OpDesc desc_;
  std::unique_ptr<OverlapOperator> operator_;
  BenchMatrix x_, whole_x_, weight_, out_, expected_, product_, residual_, gain_, hidden_;
  AddNorm add_norm_;
  int64_t counted_bytes_ = 0;
};

}  // namespace

std::unique_ptr<BenchCase> make_operator_case(Communicator& comm, const BenchRequest& request) {
  const OperatorRow* found = find_operator(request.op);
  return found ? std::make_unique<OperatorCase>(comm, request, *found) : nullptr;
}

}  // namespace tandem
