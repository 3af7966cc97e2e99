#include <map>
#include <memory>

#include "kernels/gemm.h"
#include "overlap/ag_gemm/reference.h"
#include "overlap/ag_wgrad/reference.h"
#include "overlap/bench_subject.h"
#include "overlap/gemm_ar/reference.h"
#include "overlap/gemm_rs/reference.h"
#include "tandem/overlap.h"
#include "tandem/random.h"

namespace tandem {

BenchMatrix::BenchMatrix(DType dtype, int64_t rows, int64_t columns, uint64_t seed)
    : memory(size_t(rows * columns) * size_of(dtype)), tensor(memory.view(dtype, {rows, columns})) {
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    const float value = uniform(seed, 0, uint64_t(i)) * 2 - 1;
    if (dtype == DType::f32) {
      tensor.as<float>()[i] = value;
    } else {
      tensor.as<BFloat16>()[i] = BFloat16::from_float(value);
    }
  }
}

namespace {

int64_t local(int64_t total, const Communicator& comm) {
  return shard_of(total, comm.size(), comm.rank()).count;
}

/// An operator's serial form and its overlapped one with some number of chunks.
template <typename Operator>
class OperatorSubject : public BenchSubject {
 public:
  OperatorSubject(Communicator& comm, const typename Operator::Shape& shape)
      : comm_(comm), shape_(shape), serial_(comm, shape, {Strategy::serial, 0}) {}
  std::string baseline() const override { return "whole collective and GEMM, the faster of two"; }
  void set_chunks(int chunks) override {
    auto& made = made_[chunks];
    if (!made) {
      made =
          std::make_unique<Operator>(comm_, shape_, OverlapOptions{Strategy::overlapped, chunks});
    }
    overlapped_ = made.get();
  }
  void drop_other_chunks() override {
    std::erase_if(made_, [&](const auto& entry) { return entry.second.get() != overlapped_; });
  }

 protected:
  Communicator& comm_;
  typename Operator::Shape shape_;
  Operator serial_;
  std::map<int, std::unique_ptr<Operator>> made_;  // by chunks
  Operator* overlapped_ = nullptr;
};

class AgGemmSubject : public OperatorSubject<AgGemm> {
 public:
  AgGemmSubject(Communicator& comm, const BenchRequest& r)
      : OperatorSubject(comm, {r.m, local(r.n, comm), r.k, r.dtype}),
        x_(r.dtype, local(r.m, comm), r.k, 1 + uint64_t(comm.rank())),
        whole_x_(r.dtype, r.m, r.k, 1),
        weight_(r.dtype, shape_.n, r.k, 100 + uint64_t(comm.rank())),
        out_(r.dtype, r.m, shape_.n, 0),
        expected_(r.dtype, r.m, shape_.n, 0) {}
  void gemm_alone() override {
    gemm(whole_x_.tensor, weight_.tensor.transposed(), expected_.tensor);
  }
  void reference() override {
    ag_gemm_reference(comm_, x_.tensor, weight_.tensor, expected_.tensor, nullptr);
  }
  void serial() override { serial_.run(x_.tensor, weight_.tensor, out_.tensor); }
  void overlapped() override { overlapped_->run(x_.tensor, weight_.tensor, out_.tensor); }
  Tensor result() const override { return out_.tensor; }
  Tensor expected() const override { return expected_.tensor; }
  int64_t wire_bytes() const override { return int64_t(x_.tensor.bytes()) * (comm_.size() - 1); }

 private:
  BenchMatrix x_, whole_x_, weight_, out_, expected_;
};

/// What GEMM+RS and GEMM+AR share.
template <typename Operator>
class SumSubject : public OperatorSubject<Operator> {
 public:
  SumSubject(Communicator& comm, const BenchRequest& r, const typename Operator::Shape& shape,
             int64_t out_rows)
      : OperatorSubject<Operator>(comm, shape),
        x_(r.dtype, r.m, shape.k, 1 + uint64_t(comm.rank())),
        weight_(r.dtype, r.n, shape.k, 100 + uint64_t(comm.rank())),
        partial_(r.dtype, r.m, r.n, 0),
        out_(r.dtype, out_rows, r.n, 0),
        expected_(r.dtype, out_rows, r.n, 0) {}
  void gemm_alone() override { gemm(x_.tensor, weight_.tensor.transposed(), partial_.tensor); }
  Tensor result() const override { return out_.tensor; }
  Tensor expected() const override { return expected_.tensor; }
  int64_t wire_bytes() const override {
    const int64_t whole = int64_t(partial_.tensor.bytes());
    return whole - whole / this->comm_.size();
  }

 protected:
  BenchMatrix x_, weight_, partial_, out_, expected_;
};

class GemmRsSubject : public SumSubject<GemmRs> {
 public:
  GemmRsSubject(Communicator& comm, const BenchRequest& r)
      : SumSubject(comm, r, {r.m, r.n, local(r.k, comm), r.dtype}, local(r.m, comm)) {}
  void reference() override {
    gemm_rs_reference(comm_, x_.tensor, weight_.tensor, expected_.tensor, nullptr);
  }
  void serial() override { serial_.run(x_.tensor, weight_.tensor, out_.tensor); }
  void overlapped() override { overlapped_->run(x_.tensor, weight_.tensor, out_.tensor); }
};

class GemmArSubject : public SumSubject<GemmAr> {
 public:
  GemmArSubject(Communicator& comm, const BenchRequest& r)
      : SumSubject(comm, r, shape_of(r, comm), r.m),
        residual_(r.dtype, r.add_norm ? r.m : 0, r.n, 2),
        gain_(r.dtype, 1, r.n, 3),
        hidden_(r.dtype, residual_.tensor.dim(0), r.n, 4),
        add_norm_{residual_.tensor, gain_.memory.view(r.dtype, {r.n}), hidden_.tensor, 1e-5f} {}
  void reference() override {
    gemm_ar_reference(comm_, x_.tensor, weight_.tensor, expected_.tensor, nullptr, tail());
  }
  void serial() override { run(serial_); }
  void overlapped() override { run(*overlapped_); }
  int64_t wire_bytes() const override { return 2 * SumSubject::wire_bytes(); }

 private:
  static GemmAr::Shape shape_of(const BenchRequest& r, Communicator& comm) {
    return {.m = r.m, .n = r.n, .k = local(r.k, comm), .dtype = r.dtype, .add_norm = r.add_norm};
  }
  const AddNorm* tail() const { return shape_.add_norm ? &add_norm_ : nullptr; }
  void run(GemmAr& op) { op.run(x_.tensor, weight_.tensor, out_.tensor, nullptr, nullptr, tail()); }
  BenchMatrix residual_, gain_, hidden_;
  AddNorm add_norm_;
};

class AgWgradSubject : public OperatorSubject<AgWgrad> {
 public:
  AgWgradSubject(Communicator& comm, const BenchRequest& r)
      : OperatorSubject(comm, {r.m, local(r.n, comm), r.k, r.dtype}),
        x_(r.dtype, local(r.m, comm), r.k, 1 + uint64_t(comm.rank())),
        whole_x_(r.dtype, r.m, r.k, 1),
        dy_(r.dtype, r.m, shape_.n, 100 + uint64_t(comm.rank())),
        scratch_(DType::f32, shape_.n, r.k, 0),
        out_(DType::f32, shape_.n, r.k, 0),
        expected_(DType::f32, shape_.n, r.k, 0) {}
  void gemm_alone() override {
    gemm(dy_.tensor.transposed(), whole_x_.tensor, scratch_.tensor, {nullptr, true});
  }
  void reset() override {
    clear(out_);
    clear(expected_);
  }
  void reference() override { ag_wgrad_reference(comm_, x_.tensor, dy_.tensor, expected_.tensor); }
  void serial() override { serial_.run(x_.tensor, dy_.tensor, scratch_.tensor); }
  void overlapped() override { overlapped_->run(x_.tensor, dy_.tensor, out_.tensor); }
  Tensor result() const override { return out_.tensor; }
  Tensor expected() const override { return expected_.tensor; }
  int64_t wire_bytes() const override { return int64_t(x_.tensor.bytes()) * (comm_.size() - 1); }

 private:
  static void clear(const BenchMatrix& m) {
    std::fill_n(m.tensor.as<float>(), m.tensor.elements(), 0.0f);
  }
  BenchMatrix x_, whole_x_, dy_, scratch_, out_, expected_;
};

}  // namespace

std::unique_ptr<BenchSubject> make_operator_subject(Communicator& comm,
                                                    const BenchRequest& request) {
  if (request.op == "ag_gemm") return std::make_unique<AgGemmSubject>(comm, request);
  if (request.op == "gemm_rs") return std::make_unique<GemmRsSubject>(comm, request);
  if (request.op == "gemm_ar") return std::make_unique<GemmArSubject>(comm, request);
  if (request.op == "ag_wgrad") return std::make_unique<AgWgradSubject>(comm, request);
  return nullptr;
}

}  // namespace tandem
