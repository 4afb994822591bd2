"""The settings of a spec: experiments, callbacks and tracking, and the reference generated from them."""
