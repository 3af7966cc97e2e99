// Which wire format each site of a model uses.
#pragma once

#include <string>
#include <string_view>

#include "model/config.h"
#include "tandem/codec.h"

namespace tandem {

/// Sites: the sums of the attention output's and of the MLP output's partial products over the
/// tensor-parallel ranks, in the forward pass. At one rank nothing is sent, or encoded.
struct CodecPolicy {
  Wire attention, mlp;

  /// "int8" for all sites, or "mlp=int4:g32,attention=int8", where the others stay plain; `attn`
  /// is short for attention. Throws InvalidArgument for an unknown site or format and a site named
  /// twice.
  static CodecPolicy parse(std::string_view text);
  /// What `parse` turns into this; "none".
  std::string describe() const;
  bool is_none() const { return attention.is_none() && mlp.is_none(); }
  /// Throws InvalidArgument naming what `config` on `tp` ranks would ignore: any codec at one rank;
  /// one for MLPs where there are only experts, whose sums stay plain; two in a parallel block,
  /// which has one sum.
  void require_used(const ModelConfig& config, int tp) const;
  bool operator==(const CodecPolicy&) const = default;
};

}  // namespace tandem
