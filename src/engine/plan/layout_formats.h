// ZeRO stage and wire formats of a layout: what they change in the work and memory of a rank.
#pragma once

#include <string_view>

#include "engine/model/codec_policy.h"
#include "engine/plan/cost/gpu_spec.h"
#include "engine/plan/cost/rank_state.h"
#include "engine/plan/cost/step_work.h"

namespace tandem::plan {

struct LayoutFormats {
  int zero = 1;  ///< parallel.zero
  CodecPolicy codec;
};

/// Largest error bound among the sites' formats, relative to the absmax of a group of values
/// (Wire::error_bound); 0 if all formats are exact.
double error_of(const CodecPolicy& codec);

/// Error bound that "lossless" (0), a wire format ("int8") or a percentage ("0.5%") stands for.
/// Throws InvalidArgument for another text.
double parse_accuracy(std::string_view text);

/// Exchange of values of one size, at the rate of its link.
struct Exchange {
  double seconds = 0;        ///< uncompressed
  double elements = 0;       ///< that a rank sends
  double element_bytes = 2;  ///< of an uncompressed element
  /// Passes of a rank's kernels over the elements sent: 2 if it encodes and decodes as many.
  double codings = 2;
};
/// Bytes of an element in a wire format; `element_bytes`: 2 of an activation, 4 of a gradient.
double bytes_per_element(const Wire& wire, double element_bytes);
/// Bytes/s, read and written, of kernels that encode or decode a format.
double codec_rate(const Wire& wire, const GpuSpec& gpu);
/// Seconds in a wire format: its bytes over the link, and the kernels that encode and decode, which
/// overlap, as the root of squares.
double encoded_seconds(const Exchange& exchange, const Wire& wire, const GpuSpec& gpu);

/// Exchanges of a layout in which formats may differ: of a layer and microbatch (tp, ep), of a
/// microbatch (stages), of a step (gradients, weights).
struct LayoutExchanges {
  Exchange tp, ep, stages, gradients, weights;
  double tp_left = 0, ep_left = 0;  ///< seconds of those that stay uncompressed
};
/// For the work of a ZeRO-1 row. In a layer of each kind `tp_sums` of the two sums of the forward
/// pass have a format.
LayoutExchanges exchanges_of(const RunRow& row, const GpuSpec& gpu, const StepWork& work,
                             double tp_sums);

/// Work of the row in these formats, from its work with ZeRO-1 and without formats.
StepWork work_in_formats(const RunRow& row, const GpuSpec& gpu, StepWork work,
                         const LayoutExchanges& exchanges, const LayoutFormats& formats);

/// Bytes of weights, gradients and optimizer state of a rank, as engine/plan/cost/memory.h counts
/// them in bf16, and with ZeRO-2 the gradients that have not left yet.
double state_bytes(const RunRow& row, const LayoutFormats& formats);

}  // namespace tandem::plan
