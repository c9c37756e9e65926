/* Where torch keeps `hasPrimaryContext` of its hooks, and what it calls to trace a GPU and to let go of
 * an object of Python: read from the assembly that this compiles to. */
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/PyInterpreter.h>
using Trace = c10::impl::PyInterpreterVTable;
bool (at::CUDAHooksInterface::*weft_slot)(c10::DeviceIndex) const = &at::CUDAHooksInterface::hasPrimaryContext;
void (Trace::*weft_first_trace)(c10::DeviceType, uintptr_t) const = &Trace::trace_gpu_event_creation;
void (Trace::*weft_last_trace)(c10::DeviceType, uintptr_t) const = &Trace::trace_gpu_event_synchronization;
void (Trace::*weft_decref)(PyObject *) const = &Trace::decref;
