#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "bench/bench_case.h"
#include "bench/bench_operator.h"
#include "comm/workspace.h"
#include "gemm/gemm.h"
#include "overlap/ag_gemm/cpu.h"
#include "overlap/ag_gemm/reference.h"
#include "overlap/ag_wgrad/cpu.h"
#include "overlap/ag_wgrad/reference.h"
#include "overlap/contract/encoded_candidates.h"
#include "overlap/gemm_ar/cpu.h"
#include "overlap/gemm_ar/reference.h"
#include "overlap/gemm_rs/cpu.h"
#include "overlap/gemm_rs/reference.h"
#include "tandem/random.h"

namespace tandem {

BenchMatrix::BenchMatrix(DType dtype, int64_t rows, int64_t columns, uint64_t seed, BenchData data)
    : memory(size_t(rows * columns) * size_of(dtype)), tensor(memory.view(dtype, {rows, columns})) {
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    const float value = data == BenchData::normal ? normal(seed, 0, uint64_t(i))
                                                  : uniform(seed, 0, uint64_t(i)) * 2 - 1;
    if (dtype == DType::f32) {
      tensor.as<float>()[i] = value;
    } else {
      tensor.as<BFloat16>()[i] = BFloat16::from_float(value);
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

double error_of_wire(const Wire& wire, DType dtype) {
  if (wire.is_exact()) return 0;
  return wire.error_bound() + (dtype == DType::f32 ? 0 : 0x1p-8);
}

namespace {

int64_t local(int64_t total, const Communicator& comm) {
  return shard_of(total, comm.size(), comm.rank()).count;
}

int64_t gathered_bytes(const Communicator& comm, const OpDesc& d) {
  return d.x.rows * d.x.columns * int64_t(size_of(d.dtype)) * (comm.size() - 1);
}
int64_t scattered_bytes(const Communicator& comm, const OpDesc& d) {
  const int64_t whole = d.m * d.n * int64_t(size_of(d.dtype));
  return whole - whole / comm.size();
}

/// Allows uncompressed candidates, too.
OpDesc with_wire(const OpDesc& desc, const BenchRequest& request) {
  return encoded(desc, {.wire = request.wire, .allow_uncompressed = true});
}

void multiply(const Tensor& x, const Tensor& weight, const Tensor& out) {
  gemm(x, weight.transposed(), out);
}

using Magnitudes = BenchOperator::Magnitudes;

double gathered_error(const OpDesc& d, int, const Magnitudes& of) {
  return error_of_wire(d.wire, d.dtype) * of.weight_row;
}
/// Assumes that other ranks' partial products have a similar magnitude.
double scattered_error(const OpDesc& d, int ranks, const Magnitudes& of) {
  return (ranks - 1) * error_of_wire(d.wire, d.dtype) * of.partial * 1.5;
}
double summed_error(const OpDesc& d, int ranks, const Magnitudes& of) {
  const double partial = ranks * error_of_wire(d.wire, d.dtype) * of.partial * 1.5;
  return partial + error_of_wire(d.wire, d.dtype) * (of.expected + partial);
}

std::vector<BenchOperator> own_operators() {
  std::vector<BenchOperator> all;
  all.push_back({"ag_gemm",
                 [](const Communicator& comm, const BenchRequest& r) {
                   return with_wire(ag_gemm_desc(comm, {r.m, local(r.n, comm), r.k, r.dtype}), r);
                 },
                 make_operator<AgGemmCpu>,
                 [](Communicator& comm, const Operands& o) {
                   ag_gemm_reference(comm, o.x, o.weight, o.out, o.bias);
                 },
                 gathered_bytes, multiply, false, gathered_error});
  all.push_back({"gemm_rs",
                 [](const Communicator& comm, const BenchRequest& r) {
                   return with_wire(gemm_rs_desc(comm, {r.m, r.n, local(r.k, comm), r.dtype}), r);
                 },
                 make_operator<GemmRsCpu>,
                 [](Communicator& comm, const Operands& o) {
                   gemm_rs_reference(comm, o.x, o.weight, o.out, o.bias);
                 },
                 scattered_bytes, multiply, false, scattered_error});
  all.push_back(
      {"gemm_ar",
       [](const Communicator& comm, const BenchRequest& r) {
         return with_wire(gemm_ar_desc({.m = r.m,
                                        .n = r.n,
                                        .k = local(r.k, comm),
                                        .dtype = r.dtype,
                                        .add_norm = r.add_norm}),
                          r);
       },
       make_operator<GemmArCpu>,
       [](Communicator& comm, const Operands& o) {
         gemm_ar_reference(comm, o.x, o.weight, o.out, o.bias, o.add_norm);
       },
       [](const Communicator& comm, const OpDesc& d) { return 2 * scattered_bytes(comm, d); },
       multiply, false, summed_error});
  all.push_back({"ag_wgrad",
                 [](const Communicator& comm, const BenchRequest& r) {
                   return ag_wgrad_desc(comm, {r.m, local(r.n, comm), r.k, r.dtype});
                 },
                 make_operator<AgWgradCpu>,
                 [](Communicator& comm, const Operands& o) {
                   ag_wgrad_reference(comm, o.x, o.weight, o.out);
                 },
                 gathered_bytes,
                 [](const Tensor& x, const Tensor& dy, const Tensor& dw) {
                   gemm(dy.transposed(), x, dw, {nullptr, true});
                 },
                 true});
  return all;
}

/// Operator, timed with each of its candidates.
class OperatorCase : public BenchCase {
 public:
  OperatorCase(Communicator& comm, const BenchRequest& r, const BenchOperator& of)
      : comm_(comm),
        of_(of),
        desc_(of.describe(comm, r)),
        operator_(of.make(comm, desc_, {Strategy::automatic, r.chunks}, Choosing::first)),
        x_(matrix(desc_.x, 1 + uint64_t(comm.rank()))),
        whole_x_(desc_.dtype, desc_.x.rows == desc_.m ? 0 : desc_.m, desc_.k, 1),
        weight_(matrix(desc_.weight, 100 + uint64_t(comm.rank()))),
        out_(matrix(desc_.out, 0)),
        expected_(matrix(desc_.out, 0)),
        product_(desc_.out.dtype, of.accumulates ? desc_.out.rows : desc_.m, desc_.out.columns, 0),
        residual_(desc_.dtype, desc_.add_norm ? desc_.m : 0, desc_.n, 2),
        gain_(desc_.dtype, 1, desc_.n, 3),
        hidden_(desc_.dtype, residual_.tensor.dim(0), desc_.n, 4),
        add_norm_{residual_.tensor, gain_.memory.view(desc_.dtype, {desc_.n}), hidden_.tensor,
                  1e-5f} {}

  std::vector<BenchForm> forms() override {
    std::vector<BenchForm> all;
    for (const Candidate& candidate : operator_->candidates()) {
      all.push_back({candidate.name, candidate.form, candidate.chunks,
                     [this, &candidate] { run(candidate); }, candidate.encoded});
    }
    return all;
  }
  std::string baseline() const override { return "whole collective and GEMM, the fastest form"; }
  void gemm_alone() override {
    of_.gemm(desc_.x.rows == desc_.m ? x_.tensor : whole_x_.tensor, weight_.tensor,
             product_.tensor);
  }
  void reference() override { of_.reference(comm_, operands(expected_)); }
  void reset() override {
    if (!of_.accumulates) return;
    for (const BenchMatrix* each : {&out_, &expected_}) {
      std::fill_n(each->tensor.as<float>(), each->tensor.elements(), 0.0f);
    }
  }
  double codec_error() override {
    gemm_alone();
    const double largest = largest_magnitude(expected());
    if (largest == 0) return 0;
    return of_.codec_error(
               desc_, comm_.size(),
               {largest_row(weight_.tensor), largest_magnitude(product_.tensor), largest}) /
           largest;
  }
  int64_t counted_bytes() const override { return counted_bytes_; }
  Tensor result() const override { return out_.tensor; }
  Tensor expected() const override { return expected_.tensor; }
  int64_t wire_bytes() const override { return of_.wire_bytes(comm_, desc_); }

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
  const BenchOperator& of_;
  OpDesc desc_;
  std::unique_ptr<OverlapOperator> operator_;
  BenchMatrix x_, whole_x_, weight_, out_, expected_, product_, residual_, gain_, hidden_;
  AddNorm add_norm_;
  int64_t counted_bytes_ = 0;
};

}  // namespace

std::vector<BenchOperator>& bench_operators() {
  static std::vector<BenchOperator> all = own_operators();
  return all;
}

const BenchOperator* find_bench_operator(std::string_view name) {
  const auto found = std::ranges::find(bench_operators(), name, &BenchOperator::name);
  return found == bench_operators().end() ? nullptr : &*found;
}

std::unique_ptr<BenchCase> make_operator_case(Communicator& comm, const BenchRequest& request) {
  const BenchOperator* found = find_bench_operator(request.op);
  return found ? std::make_unique<OperatorCase>(comm, request, *found) : nullptr;
}

}  // namespace tandem
