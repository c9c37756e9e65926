/* Where torch's hooks keep `hasPrimaryContext`: read from the assembly that this compiles to. */
#include <ATen/detail/CUDAHooksInterface.h>
bool (at::CUDAHooksInterface::*weft_slot)(c10::DeviceIndex) const = &at::CUDAHooksInterface::hasPrimaryContext;
