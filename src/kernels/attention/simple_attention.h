// Why attention on GPUs runs simple kernels, which are many times slower than cuDNN's.
#pragma once

#include <string>

#include "kernels/attention/attention.h"

namespace tandem {

/// Circumstances of a rank that keep it from cuDNN.
struct AttentionHost {
  bool is_portable = false;  ///< TANDEM_GPU_PORTABLE
  bool shares_gpu = false;
};

/// Reason that neither cuDNN nor our Hopper kernels run attention on these tensors, or empty.
std::string why_simple_attention(const AttentionShape& shape, const AttentionRows& rows,
                                 const AttentionHost& host);

/// Reason that runs with document starts that AttentionRows did not announce leave cuDNN.
constexpr const char* kDocumentsReason =
    "documents (data.document_mask): cuDNN's kernels attend to whole sequences";

/// Logs a line, once for each reason in a process.
void note_simple_attention(const std::string& reason);

}  // namespace tandem
