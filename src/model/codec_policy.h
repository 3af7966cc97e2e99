// Which wire format each site of a model uses.
#pragma once

#include <string>
#include <string_view>

#include "tandem/codec.h"

namespace tandem {

/// Sites: the sums of the attention output's and of the MLP output's partial products over the
/// tensor-parallel ranks, in the forward pass. At one rank nothing is sent, or encoded.
struct CodecPolicy {
  Wire attention, mlp;

  /// "int8" for all sites, or "mlp=int4:g32,attention=int8", where the others stay plain. Throws
  /// InvalidArgument for an unknown site or format, a site named twice, and `lossless`, whose
  /// messages have no fixed size.
  static CodecPolicy parse(std::string_view text);
  /// What `parse` turns into this; "none".
  std::string describe() const;
  bool is_none() const { return attention.is_none() && mlp.is_none(); }
  bool operator==(const CodecPolicy&) const = default;
};

}  // namespace tandem
