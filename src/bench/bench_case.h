// Benchmark case: one computation in several forms.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "bench/codec_limit.h"
#include "tandem/tensor.h"

namespace tandem {

class BenchCase {
 public:
  virtual ~BenchCase() = default;
  virtual bool has_gemm() const { return true; }
  virtual void gemm_alone() {}
  /// Unfused reference (a collective and a full GEMM); writes its result to `expected`.
  virtual void reference() = 0;
  /// Name of the implementation that the serial time is of.
  virtual std::string baseline() const = 0;
  /// Whether the transport's library has this collective (comm/world/native.h), which is then the
  /// baseline.
  virtual bool has_native() const { return false; }
  virtual double native() { return 0; }
  virtual Tensor native_result() const { return {}; }
  /// Forms timed in addition to the reference; each writes its result to `result`.
  virtual std::vector<BoundCandidate> forms() = 0;
  /// If so, the reference is not timed separately.
  virtual bool reference_is_a_form() const { return false; }
  /// Whether `overlapped` is the fastest of all forms, overlapped or not: the one that would be
  /// chosen.
  virtual bool reports_choice() const { return false; }
  /// Receipts of the operator if it is among `forms`, having chosen.
  virtual std::vector<Receipt> receipts() const { return {}; }
  /// Clears accumulated results before a call whose result is compared.
  virtual void reset() {}
  virtual Tensor result() const = 0;
  virtual Tensor expected() const = 0;
  /// Further results to compare, each with the expected one at the same index.
  virtual std::vector<Tensor> more_results() const { return {}; }
  virtual std::vector<Tensor> more_expected() const { return {}; }
  /// Max error caused by a wire format, over the largest expected value; 0 without one.
  virtual double codec_error() { return 0; }
  /// Codec work of one call, for collectives with a wire format. Else nullptr.
  virtual std::unique_ptr<CodecWork> codec_work() { return nullptr; }
  /// Whether all ranks have the same result.
  virtual bool is_same_on_all_ranks() const { return false; }
  /// Bytes sent by one rank in its last encoded call, as counted; 0 if unknown.
  virtual int64_t counted_bytes() const { return 0; }
  /// Bytes that a forward pass of one rank saves for its backward pass; 0: it has none.
  virtual int64_t saved_bytes() const { return 0; }
  /// Bytes sent by one rank.
  virtual int64_t wire_bytes() const = 0;
};

std::unique_ptr<BenchCase> make_operator_case(Communicator& comm, const BenchRequest& request);
std::unique_ptr<BenchCase> make_collective_case(Communicator& comm, const BenchRequest& request);

double largest_magnitude(const Tensor& values);
/// Largest sum of a row's magnitudes.
double largest_row(const Tensor& matrix);

/// Owned memory of one matrix, filled with random values: uniform in [-1, 1), or standard normal.
struct BenchMatrix {
  Memory memory;
  Tensor tensor;
  BenchMatrix(DType dtype, int64_t rows, int64_t columns, uint64_t seed,
              BenchData data = BenchData::uniform);
};

}  // namespace tandem
