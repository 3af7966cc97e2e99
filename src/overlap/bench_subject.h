// What one benchmark times: the same computation in several ways.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "overlap/bench.h"
#include "tandem/tensor.h"

namespace tandem {

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
  virtual bool has_serial() const { return true; }
  virtual void serial() {}
  /// How many chunks `overlapped` uses from now on. Collective for a count not set before.
  virtual void set_chunks(int chunks) = 0;
  /// Frees what counts other than the last one set need.
  virtual void drop_other_chunks() {}
  virtual void overlapped() = 0;
  /// Before a call whose result is compared: clears what results are added to.
  virtual void reset() {}
  virtual Tensor result() const = 0;
  virtual Tensor expected() const = 0;
  /// Bytes one rank sends.
  virtual int64_t wire_bytes() const = 0;
};

std::unique_ptr<BenchSubject> make_operator_subject(Communicator& comm,
                                                    const BenchRequest& request);
std::unique_ptr<BenchSubject> make_collective_subject(Communicator& comm,
                                                      const BenchRequest& request);

/// Owned memory of one matrix, filled with a cheap pattern in [-1, 1].
struct BenchMatrix {
  Buffer memory;
  Tensor tensor;
  BenchMatrix(DType dtype, int64_t rows, int64_t columns, uint64_t seed);
};

}  // namespace tandem
