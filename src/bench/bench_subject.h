// What one benchmark times: the same computation in several ways.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "bench/codec_limit.h"
#include "tandem/tensor.h"

namespace tandem {

struct BenchForm {
  std::string name;
  Form form;
  int chunks;  ///< transfers of a shard
  std::function<void()> run;
  bool encoded = false;  ///< in a wire format: no baseline
};

class BenchSubject {
 public:
  virtual ~BenchSubject() = default;
  virtual bool has_gemm() const { return true; }
  virtual void gemm_alone() {}
  /// The unfused reference (a plain collective and a whole GEMM); leaves its result in `expected`.
  virtual void reference() = 0;
  /// What the serial time is of.
  virtual std::string baseline() const = 0;
  /// The library's own collective under the transport (comm/native.h): then it is the baseline.
  virtual bool has_native() const { return false; }
  virtual double native() { return 0; }
  virtual Tensor native_result() const { return {}; }
  /// What is timed beside the reference; each leaves its result in `result`.
  virtual std::vector<BenchForm> forms() = 0;
  /// It is not timed beside them.
  virtual bool reference_is_a_form() const { return false; }
  /// `overlapped` is the fastest of all of them, whether it overlaps or not: what would be chosen.
  virtual bool reports_choice() const { return false; }
  /// Before a call whose result is compared: clears what results are added to.
  virtual void reset() {}
  virtual Tensor result() const = 0;
  virtual Tensor expected() const = 0;
  /// What else is compared, each in the place of the one expected of it.
  virtual std::vector<Tensor> more_results() const { return {}; }
  virtual std::vector<Tensor> more_expected() const { return {}; }
  /// The largest error that a wire format may cause, over the largest expected value; 0 without.
  virtual double codec_error() { return 0; }
  /// With a wire format, of a plain collective: the codec's work of one call. Else nullptr.
  virtual std::unique_ptr<CodecWork> codec_work() { return nullptr; }
  /// Whether all ranks have the same result.
  virtual bool is_same_on_all_ranks() const { return false; }
  /// Bytes that one rank's last encoded call put on the wire, as counted; 0 where it is not known.
  virtual int64_t counted_bytes() const { return 0; }
  /// Bytes one rank sends.
  virtual int64_t wire_bytes() const = 0;
};

std::unique_ptr<BenchSubject> make_operator_subject(Communicator& comm,
                                                    const BenchRequest& request);
std::unique_ptr<BenchSubject> make_collective_subject(Communicator& comm,
                                                      const BenchRequest& request);

double largest_magnitude(const Tensor& values);
/// The largest sum of a row's magnitudes.
double largest_row(const Tensor& matrix);
/// What an element may be off by that travelled as `wire`, where its group's largest is 1: what the
/// format loses, and the rounding of what it decodes as.
double error_of_wire(const Wire& wire, DType dtype);

/// Owned memory of one matrix, filled with random values: uniform in [-1, 1), or standard normal.
struct BenchMatrix {
  Buffer memory;
  Tensor tensor;
  BenchMatrix(DType dtype, int64_t rows, int64_t columns, uint64_t seed,
              BenchData data = BenchData::uniform);
};

}  // namespace tandem
