// Options of an overlap operator: strategy, chunks and wire format.
#pragma once

#include <cstdint>
#include <string_view>

#include "tandem/codec.h"
#include "tandem/export.h"

TANDEM_API_BEGIN
namespace tandem {

enum class Strategy : uint8_t {
  automatic,   ///< timed once by the tuner, never slower than serial (GPUs: NCCL's serial)
  serial,      ///< collective, then GEMM (or the reverse)
  overlapped,  ///< tiles start as data arrives, are sent when done (GPUs: serial if none can)
};
std::string_view name_of(Strategy strategy);

struct OverlapOptions {
  Strategy strategy = Strategy::automatic;
  int chunks = 0;  ///< transfers per shard when overlapped; 0: chosen; on GPUs always 0
  /// Wire format of rows (see tandem/overlap.h). On CPU ranks every candidate then gives the same
  /// bits, which differ from uncompressed ones unless the format is lossless.
  Wire wire = {};
  /// Lets `automatic` also time uncompressed candidates if there is a wire format, and use the
  /// fastest of all.
  bool allow_uncompressed = false;
  /// Throws Unsupported on all ranks, at construction, if what would run does not overlap and the
  /// strategy is not `serial`: `automatic`, too, asks for overlap, though serial may be faster. The
  /// error says why. TANDEM_STRICT=1 sets it for all operators.
  bool strict = false;
};

}  // namespace tandem
TANDEM_API_END
